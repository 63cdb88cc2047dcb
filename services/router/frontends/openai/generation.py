"""Generates all choices of a request at once, and merges them into one stream."""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.errors import PenstockError
from penstock.v1 import common_pb2, generate_pb2
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.choice import Choice, ChoiceDelta
from services.router.frontends.openai.parsed_request import ParsedRequest
from services.router.resumable_stream import ResumableStream

_MAX_AHEAD = 64
"""Maximum deltas that wait to be sent. Beyond it, a slow client holds up the engine, not this process's memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Special conditions for an answer."""

    wait_s: float = 0.0
    """Seconds that it may wait while no engine can take it, if more than `router.wait_for_replica_s`."""
    timeout_s: float = 0.0
    """Its deadline in seconds, if later than `OpenAITuning.timeout_s`."""
    restore_images: Callable[[], Awaitable[None]] | None = None
    """Stores the request's images, in case an engine misses one."""
    restorable_bytes: int = 0
    """Bytes of the images that `restore_images` holds."""
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs while the answer is generated, which ends with the error that it raises."""
    note_failure: Callable[[PenstockError, Sequence[Choice]], Awaitable[None]] | None = None
    """Called with the error that ends the answer and what had come of it, before its client hears of the error."""


@asynccontextmanager
async def generating(
    forwarder: RequestForwarder,
    request: ParsedRequest,
    choices: Sequence[Choice],
    terms: Terms,
    *,
    timeout_s: float,
    chunk_tokens: int,
    is_streamed: bool,
) -> AsyncIterator[AsyncIterator[tuple[int, ChoiceDelta]]]:
    """Generate the choices during the context, which yields their deltas with the choice's index.

    Leaving the context early aborts the remaining calls in the engines. The delta of a choice with a form is the whole
    choice, because the form starts over if an engine fails; not so if it is streamed, or its text may end it.

    Raises:
        PenstockError: one of the choices failed, or `terms.watch` did; the others are aborted.
        TimeoutError: the context took `timeout_s`, even because a client does not read: slots are held no longer.
    """
    deltas: asyncio.Queue[tuple[int, ChoiceDelta]] = asyncio.Queue(_MAX_AHEAD)
    prompts = [_serialize(request, index) for index in range(0, len(choices), request.num_choices)]
    is_whole = request.sampling.HasField("constraint") and not (is_streamed or request.is_cut_by_text)
    kept_bytes = sum(prompt.size_bytes for prompt in request.prompts) + terms.restorable_bytes

    async def generate(index: int) -> None:
        choice, name = choices[index], generate_pb2.GenerateRequest(request_id=f"{request.request_id}/{index}")
        own, shared = name.SerializeToString(), prompts[index // request.num_choices]
        stream = ResumableStream(own, shared, chunk_tokens=chunk_tokens, may_restart=is_whole)
        is_first_of_prompt = index % request.num_choices == 0
        forwarded = forwarder.forward(
            stream,
            timeout_s=timeout_s,
            wait_s=terms.wait_s,
            restore_images=terms.restore_images,
            # A prompt counts with the first of its choices, and what the caller keeps with the first of all.
            size_bytes=len(own) + (len(shared) if is_first_of_prompt else 0) + (0 if index else kept_bytes),
        )
        async with contextlib.aclosing(_joined(forwarded, stream) if is_whole else forwarded) as chunks:
            async for raw in chunks:
                chunk = generate_pb2.GenerateChunk.FromString(raw)
                if request.scores_prompt and not choice.tokens and not chunk.HasField("prompt_logprobs"):
                    raise PenstockError("the engine did not score the prompt; leave out echo and prompt_logprobs")
                if request.is_recorded and not all(map(math.isfinite, chunk.logprobs)):
                    raise PenstockError(
                        "a logprob is not finite, so the call cannot be recorded; see whether the engine's weights are "
                        "broken"
                    )
                await deltas.put((index, choice.take(chunk, at=time.monotonic())))
                if choice.was_cut:
                    return

    async def merged() -> AsyncIterator[tuple[int, ChoiceDelta]]:
        num_left = len(choices)
        while num_left:
            index, delta = await deltas.get()
            num_left -= delta.is_last
            yield index, delta

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for index in range(len(choices)):
                group.create_task(generate(index))
            watching = None if terms.watch is None else group.create_task(terms.watch())
            yield merged()
            if watching is not None:
                watching.cancel()
    except BaseExceptionGroup as failed:  # one error is enough for the caller
        raise failed.exceptions[0] from None


async def _joined(chunks: AsyncGenerator[bytes, None], stream: ResumableStream) -> AsyncGenerator[bytes, None]:
    """Yield the whole answer as one chunk; a response has a chunk's fields."""
    async with contextlib.aclosing(chunks):
        async for _ in chunks:
            pass
    yield stream.response()


def _serialize(request: ParsedRequest, index: int) -> bytes:
    """Serialize a choice's request without its id: the part that all choices of the prompt share."""
    prompt = request.prompt_of(index)
    return generate_pb2.GenerateRequest(
        session_id=request.session_id,
        input_ids=prompt.input_ids,
        images=[
            *(common_pb2.Image(data=image) for image in prompt.images),
            *(common_pb2.Image(stored=image) for image in prompt.stored_images),
        ],
        sampling=request.sampling,
        num_top_logprobs=max(request.num_top_logprobs, request.num_prompt_logprobs or 0),
        prompt_logprobs=request.scores_prompt,
        group_id=request.group_id,
        min_policy_version=request.min_policy_version,
        exact_policy_version=request.exact_policy_version,
    ).SerializeToString()
