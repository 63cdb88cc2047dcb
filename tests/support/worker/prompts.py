"""Prompts for a worker, and what becomes of them on the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from nats.js.api import StreamState

from penstock.bus.answers import until_answered
from penstock.bus.connection import Bus, Stream
from penstock.bus.image_store import ImageStore, hash_of
from penstock.records import Group, GroupId, ImagePart, Message, Prompt, Sampling, TextPart
from penstock.records.codec import decode, encode
from penstock.runtime.security import Security
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.rollout.worker.main import serve
from tests.support.trainer.data.pictures import png
from tests.support.waiting import HANG_S, promptly, until

# A PNG, which has \r\n in it, and a byte of every value after its end: whatever a file holds must arrive as it is.
PICTURE = png() + bytes(range(256))
ANSWER = "The answer is \\boxed{3}"
_OPEN = Security()
"""Neither tokens nor TLS."""


@contextlib.asynccontextmanager
async def working(recipe: Recipe, *, security: Security = _OPEN, **constants: Any) -> AsyncIterator[asyncio.Event]:
    """A worker during the context; yields its stop event. `constants` are other values of its constants."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(service_settings.for_worker(recipe), stop, security=security, **constants))
    try:
        yield stop
    finally:
        stop.set()
        await promptly(task)


def make_prompt(run_name: str, index: int = 0, **changes: Any) -> Prompt:
    """A question with a picture; two samples."""
    fields: dict[str, Any] = {
        "id": GroupId(run_id=run_name, index=index, attempt=0, trainer_epoch="a"),
        "admitted_version": 4,
        "sampling": Sampling(temperature=1.0, max_new_tokens=16),
        "num_samples": 2,
        "messages": (Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x.\r\n"))),),
        "images": (hash_of(PICTURE),),
        "golds": ("3",),
        "profile": "math",
        "environment": "single_turn",
    }
    return Prompt(**(fields | changes))


async def publish(bus: Bus, prompt: Prompt) -> None:
    """Admit a prompt, as the trainer does."""
    images = ImageStore(bus)
    await images.ensure()
    if prompt.images:
        await images.put(prompt.id.scope, PICTURE)
    await bus.publish(bus.prompts, encode(prompt), message_id=prompt.id.message)


async def count(bus: Bus, stream: Stream) -> int:
    """Messages that the stream holds."""
    return int((await _state(bus, stream)).messages)


async def read(bus: Bus, stream: Stream) -> list[bytes]:
    """All messages of the stream, left where they are."""
    state = await _state(bus, stream)
    messages = [
        await until_answered(bus.config, stream.name, partial(bus.jetstream.get_msg, stream.name, number))
        for number in range(state.first_seq, state.last_seq + 1)
    ]
    return [message.data or b"" for message in messages]


async def _state(bus: Bus, stream: Stream) -> StreamState:
    return (await until_answered(bus.config, stream.name, lambda: bus.jetstream.stream_info(stream.name))).state


async def read_groups(bus: Bus) -> list[Group]:
    """All groups that were published."""
    return [decode(data, Group) for data in await read(bus, bus.groups)]


async def until_done(bus: Bus, num_groups: int, timeout_s: float = HANG_S) -> list[Group]:
    """Wait until this many groups are published and no prompt is left."""

    async def is_done() -> bool:
        return await count(bus, bus.groups) >= num_groups and await count(bus, bus.prompts) == 0

    await until(is_done, timeout_s)
    return await read_groups(bus)
