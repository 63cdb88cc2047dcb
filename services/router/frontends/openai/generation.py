"""Plays all choices of a request at once, and tells of them in one stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from penstock.v1 import common_pb2, generate_pb2
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.choice import Choice, Piece
from services.router.frontends.openai.parsed_request import Asked
from services.router.resumable_stream import ResumableStream

_MAX_AHEAD = 64
"""Pieces that wait to be told of; a client that reads slowly holds up the engine rather than fill this process."""


@asynccontextmanager
async def playing(
    player: RequestForwarder, asked: Asked, choices: Sequence[Choice], *, timeout_s: float, chunk_tokens: int
) -> AsyncIterator[AsyncIterator[tuple[int, Piece]]]:
    """Have `player` play the choices during the context, which yields what they say: index and piece.

    Leaving the context early aborts what still runs in the engines.

    Raises:
        PenstockError: one of the choices could not be played; the others are aborted.
        TimeoutError: the context took `timeout_s`, be it for whoever tells of the pieces: places are not held longer.
    """
    pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue(_MAX_AHEAD)

    async def play(index: int) -> None:
        choice, raw = choices[index], _request(asked, index).SerializeToString()
        answer = ResumableStream(raw, chunk_tokens=chunk_tokens)
        async with contextlib.aclosing(player.forward(answer, timeout_s=timeout_s)) as chunks:
            async for chunk in chunks:
                await pieces.put((index, choice.take(generate_pb2.GenerateChunk.FromString(chunk))))
                if choice.was_cut:
                    return

    async def told() -> AsyncIterator[tuple[int, Piece]]:
        num_left = len(choices)
        while num_left:
            index, piece = await pieces.get()
            num_left -= piece.is_last
            yield index, piece

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for index in range(len(choices)):
                group.create_task(play(index))
            yield told()
    except BaseExceptionGroup as failed:  # one error is enough for the caller
        raise failed.exceptions[0] from None


def _request(asked: Asked, index: int) -> generate_pb2.GenerateRequest:
    prompt = asked.prompt_of(index)
    return generate_pb2.GenerateRequest(
        request_id=f"{asked.request_id}/{index}",
        session_id=asked.session_id,
        input_ids=prompt.input_ids,
        images=[common_pb2.Image(data=image) for image in prompt.images],
        sampling=asked.sampling,
    )
