"""The real reward service, and an engine that gives the right answer."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict
from transformers import AutoTokenizer

from penstock.bus.connection import Bus
from penstock.config import BusConfig, ModelConfig, RunConfig
from penstock.model.chat.chat_template import Renderer
from penstock.testing.answers import SpanningAPush
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.reward import server as reward_server
from services.reward.config import RewardConfig
from services.rollout.worker.config import WorkerConfig
from tests.support.worker.agent_harness import agent_harness
from tests.support.worker.prompts import ANSWER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A pool of the reward service replaces its workers at any time, so their pipes are no test's."""
    mark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")
    for item in items:
        if isinstance(item, pytest.Function) and "reward_address" in item.fixturenames:
            item.add_marker(mark)


@pytest.fixture(scope="module")
async def reward_address() -> AsyncIterator[str]:
    """The real reward service."""
    async with reward_server.running(RewardConfig(workers=1)) as (server, *_):
        yield server.address


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    """What is logged during the test, with what a task has bound."""
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as events:
        yield events


@pytest.fixture
async def engine(bus: Bus, tiny_model_path: Path) -> AsyncIterator[SimulatedEngine]:
    """An engine that gives the right answer, as policy version 4 and then 5."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    answer = SpanningAPush(tokenizer(ANSWER + "<|im_end|>", add_special_tokens=False).input_ids)
    async with SimulatedEngine(bus, answer=answer, policy_version=4).running() as engine:
        yield engine


@pytest.fixture
def make_recipe(
    bus_config: BusConfig, run_name: str, tiny_model_path: Path, reward_address: str
) -> Callable[..., Recipe]:
    """Recipes of this test's run; `grace_s` is the run's, `ack_wait_s` the bus's, all else is the worker's.

    Prompts are not delivered again while this process, which often plays the engine too, is busy.
    """

    def make(router_address: str, *, grace_s: float = 5.0, ack_wait_s: float = 5.0, **worker: Any) -> Recipe:
        fields = {"router_address": router_address, "reward_address": reward_address, "concurrency": 4} | worker
        return Recipe(
            model=ModelConfig(path=tiny_model_path),
            run=RunConfig(name=run_name, grace_s=grace_s),
            bus=bus_config.model_copy(update={"ack_wait_s": ack_wait_s}),
            worker=WorkerConfig(**fields),
        )

    return make


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The model's template and tokenizer."""
    return Renderer.load(tiny_model_path)


@pytest.fixture
async def make_harness(make_recipe: Callable[..., Recipe]) -> AsyncIterator[Callable[..., Any]]:
    """Begins `agent_harness` for the rest of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(agents: dict[str, Any], **settings: Any) -> Recipe:
            return await stack.enter_async_context(agent_harness(make_recipe, agents, **settings))

        yield make
