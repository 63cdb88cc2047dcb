"""What the tests of the OpenAI-compatible frontend act on."""

import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from penstock.bus.connection import Bus
from penstock.model.chat.chat_template import Renderer
from penstock.rpc.channel import connect
from penstock.testing.answers import Saying
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.router.process import RouterProcess
from tests.support.waiting import HANG_S, until

MODEL_PATH = Path(__file__).parents[3] / "models/tiny-qwen3-vl"
END_ID = 356
"""<|im_end|>"""
IMAGE_ID = 366
"""The placeholder of an image."""
HI: list[Any] = [{"role": "user", "content": "hi"}]
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
"""As good as an image for engines that do not look."""


def data_url(image: bytes, kind: str = "png") -> str:
    """The image as a URL."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


async def collect(stream: Any) -> list[Any]:
    """All chunks, but those that only count."""
    return [chunk async for chunk in stream]


def text_of(chunks: list[Any], index: int = 0) -> str:
    """What the chunks say of a choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


@dataclass(frozen=True)
class Harness:
    """Routers, engines and clients of one run."""

    run: str
    bus: Bus
    engines: Sequence[SimulatedEngine]
    routers: Sequence[RouterProcess]
    renderer: Renderer
    clients: Sequence[AsyncOpenAI] = ()
    """One for each router, for the time of one test."""

    @property
    def client(self) -> AsyncOpenAI:
        """Of the first router."""
        return self.clients[0]

    def says(self, text: str) -> list[int]:
        """Have both engines say `text` and end; returns the ids."""
        ids = [*self.renderer.render_text(text), END_ID]
        for engine in self.engines:
            engine.answer = Saying(ids)
        return ids

    @property
    def requests(self) -> list[Any]:
        """What the engines were asked since the test began."""
        return [request for engine in self.engines for request in engine.requests]

    async def chat(self, messages: list[Any] = HI, **options: Any) -> Any:
        """Ask the first router."""
        return await self.client.chat.completions.create(model=self.run, messages=messages, **options)

    async def chat_to_the_end(self, *, stream: bool, **options: Any) -> None:
        """Ask, and hear all of the answer; a stream may not tell of an end before it fails."""
        answer = await self.chat(stream=stream, **options)
        if stream:
            async for chunk in answer:
                assert chunk.choices[0].finish_reason is None or chunk.penstock

    @contextlib.asynccontextmanager
    async def http(self, router: int = 0) -> AsyncIterator[httpx.AsyncClient]:
        """A plain HTTP client of a router."""
        async with httpx.AsyncClient(base_url=self.routers[router].url, timeout=HANG_S) as client:
            yield client

    async def recordings(self, session: str, router: int = 0, **params: Any) -> list[dict[str, Any]]:
        """What the router gives back of a session."""
        async with self.http(router) as client:
            answer = await client.get(f"/v1/penstock/recordings/{session}", params=params)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["data"])

    async def reset(self) -> None:
        """Engines as at the beginning, known to all routers as fit, once the last test's cancelled calls have ended."""
        await until(lambda: not any(engine.num_running for engine in self.engines))
        for engine in self.engines:
            engine.delay_s = engine.token_s = 0.0
            engine.scores = True
            engine.image_store = None
            engine.error = engine.fail_after = engine.fail_with = engine.hang_after = None
            engine.released.clear()
            engine.requests.clear()
            engine.num_calls = engine.num_cancelled = 0
            await engine.update(state=common_pb2.REPLICA_STATE_READY)
        self.says("fine")
        await self.until_routable(len(self.engines))

    async def until_routable(self, count: int) -> None:
        """Wait until all routers know this many engines that may be given calls, and none that has one."""
        for router in self.routers:
            await until_idle(router.address, num_routable=count)

    async def until_waiting(self, count: int, *, min_bytes: int = 0) -> None:
        """Wait until `count` calls, of at least `min_bytes` bytes together, wait for an engine at the first router."""
        await _until_pool(
            self.routers[0].address, lambda pool: pool.num_waiting == count and pool.num_waiting_bytes >= min_bytes
        )

    async def until_load(self, num_running: int) -> None:
        """Wait until all routers have heard that this many calls run, by what the engines say."""
        for router in self.routers:
            await _until_pool(
                router.address, lambda pool: sum(each.replica.num_running for each in pool.replicas) == num_running
            )


async def until_idle(router: str, *, num_routable: int | None = None) -> None:
    """Wait until no engine of the router at this address has a call, and this many of them may be given one."""

    def is_idle(pool: router_pb2.ListReplicasResponse) -> bool:
        num_in_flight = sum(each.num_in_flight for each in pool.replicas)
        return num_in_flight == 0 and num_routable in (None, sum(each.routable for each in pool.replicas))

    await _until_pool(router, is_idle)


async def _until_pool(router: str, holds: Callable[[router_pb2.ListReplicasResponse], bool]) -> None:
    """Wait until the router at this address sees its pool so."""
    async with connect(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def sees() -> bool:
            return holds(await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=HANG_S))

        await until(sees)
