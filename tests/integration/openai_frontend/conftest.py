"""Two routers as processes over two simulated engines that say what they are told, and OpenAI's client for each."""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from penstock.bus.connection import connect
from penstock.config import BusConfig
from penstock.model.chat.chat_template import Renderer
from penstock.testing.simulated_engine import SimulatedEngine
from tests.support.router.openai_harness import MODEL_PATH, Harness
from tests.support.router.process import router_process


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """The model's template and tokenizer."""
    return Renderer.load(MODEL_PATH)


@pytest.fixture(scope="package")
async def whole_harness(nats_url: str, renderer: Renderer) -> AsyncIterator[Harness]:
    """Everything, until a test of another folder comes: idle routers, which follow the bus, take 1% of a core each.

    The leases outlast whatever keeps this process busy, which renews them.
    """
    run = f"test-{uuid.uuid4().hex[:12]}"
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(BusConfig(url=nats_url, lease_ttl_s=60.0), run=run))
        engines = [
            await stack.enter_async_context(
                SimulatedEngine(bus, replica_id=f"r{index}", policy_version=3 + index).running()
            )
            for index in range(2)
        ]
        settings = ("--bus.lease_ttl_s=60", "--router.wait_for_replica_s=1", "--run.grace_s=0",
                    "--sampling.temperature=0.5", "--sampling.max_new_tokens=77")  # fmt: skip
        starting = [stack.enter_async_context(router_process(nats_url, run, MODEL_PATH, *settings)) for _ in range(2)]
        routers = await asyncio.gather(*starting)
        yield Harness(run=run, bus=bus, engines=engines, routers=routers, renderer=renderer)
        await bus.delete_run()


@pytest.fixture
async def harness(whole_harness: Harness) -> AsyncIterator[Harness]:
    """The harness with engines as they were at the beginning, and with clients that have no connections yet."""
    await whole_harness.reset()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=30.0)
            )
            for router in whole_harness.routers
        ]
        yield dataclasses.replace(whole_harness, clients=clients)
