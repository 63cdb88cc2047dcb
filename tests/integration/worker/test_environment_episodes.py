"""Whole episodes whose environment runs in a process of its own."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from penstock.errors import InvalidRequestError, PoisonError, UnavailableError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits
from penstock.runtime.security import Security
from penstock.v1 import generate_pb2
from services.rollout.worker.closings import Closings
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.hosting.server import serving_environments
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.episode import Episode
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf
from tests.support.worker.hosted_episodes import HERE
from tests.support.worker.scripted_episodes import END, PICTURE, ScriptedPolicy, make_player, make_prompt, play


@pytest.mark.parametrize(
    ("kind", "finish_reason", "reason"),
    [
        ("Segfaults", "error", "environment 'Segfaults': its process was ended by SIGSEGV during step"),
        ("NotANumber", "error", "environment 'NotANumber': step raised ValueError: reward = nan"),
        ("LongWinded", "length", "step: the text of an observation has 10000000 characters; at most 2097152"),
        (
            "HugePicture",
            "length",
            "step: the images of an observation have 209715200 bytes; at most 33554432",
        ),
        ("Sleeps", "deadline", "the environment's step took longer than the episode has; see worker.episode_timeout_s"),
    ],
)
async def test_a_bad_environment_costs_its_sample_and_keeps_its_tokens(
    renderer: Renderer, kind: str, finish_reason: str, reason: str
) -> None:
    """A sample beside it, of an environment that behaves, is played to its end meanwhile."""
    paths = {name: f"{HERE}:{name}" for name in (kind, "Echo")}
    async with EnvironmentRegistry(WorkerConfig(environments=paths).environments) as registry:

        async def play_with(name: str) -> Episode:
            policy = ScriptedPolicy(renderer, [("stop" + END, 4)])
            player = make_player(renderer, policy, environments=registry)
            limits = Limits(episode_timeout_s=8.0) if name == "Sleeps" else Limits()
            return await play(player, make_prompt(name, limits=limits))

        bad, good = await asyncio.gather(play_with(kind), play_with("Echo"))
    assert bad.finish_reason == finish_reason
    sample = bad.to_sample(None)
    assert (sample.error if finish_reason == "error" else sample.ended_by).startswith(reason)
    assert (not sample.error, bad.needs_verdict) == (finish_reason != "error",) * 2
    assert len(sample.sequences[0].token_ids) > 0
    assert (good.finish_reason, good.reward) == ("stop", 1.0)


@contextlib.asynccontextmanager
async def hosted(where: str) -> AsyncIterator[EnvironmentRegistry]:
    """`CannotBegin` under the name "mine", in the worker's loop, in a process, or at a server in either."""
    table = {"class": f"{HERE}:CannotBegin", "isolated": where.endswith("process")}
    async with contextlib.AsyncExitStack() as stack:
        if where.startswith("server"):
            tables = WorkerConfig(environments={"theirs": table}).environments
            served = await stack.enter_async_context(EnvironmentRegistry(tables))
            server = await stack.enter_async_context(serving_environments(served, ["theirs"], security=Security()))
            table = {"url": server.url, "name": "theirs"}
        tables = WorkerConfig(environments={"mine": table}).environments
        yield await stack.enter_async_context(EnvironmentRegistry(tables))


@pytest.mark.parametrize("where", ["loop", "process", "server", "server process"])
@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        ("bug", PoisonError, "environment 'mine': .*RuntimeError: no board.*; its reset failed 3 times"),
        ("away", UnavailableError, "ConnectionRefusedError: the tool server is away"),
        ("full", UnavailableError, "no board is free"),
        ("wrong", InvalidRequestError, "^the row has no board$"),
    ],
)
async def test_what_a_reset_raises_means_the_same_everywhere(
    renderer: Renderer, where: str, error: str, kind: type[Exception], reason: str
) -> None:
    """Whether the group is given up or put back does not depend on where its environment runs."""
    async with hosted(where) as registry:
        player = make_player(renderer, ScriptedPolicy(renderer, []), environments=registry)
        with pytest.raises(kind, match=reason):
            await play(player, make_prompt("mine", extra={"error": error}))


class LatePolicy(ScriptedPolicy):
    """Says "stop" in each turn, and waits with the first for a second; then 500 s pass for everybody."""

    def __init__(self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(renderer, [("stop" + END, 4)] * 6)
        self._monkeypatch = monkeypatch
        self._has_second = asyncio.Event()

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """The turn."""
        async with aclosing(super().stream(request, timeout_s=timeout_s)) as chunks:
            async for chunk in chunks:
                if len(self.requests) == 2 and not self._has_second.is_set():
                    self._monkeypatch.setattr(time, "monotonic", functools.partial(_later, time.monotonic))
                    self._has_second.set()
                await self._has_second.wait()
                yield chunk


def _later(monotonic: Callable[[], float]) -> float:
    return monotonic() + 500.0


def counting_others(folder: Path, *, max_processes: int) -> EnvironmentRegistry:
    """Environments that measure how many of them have a process."""
    table = {"class": f"{HERE}:CountsOthers", "args": {"folder": str(folder)}}
    tables = WorkerConfig(environments={"CountsOthers": table}).environments
    return EnvironmentRegistry(tables, max_processes=max_processes)


async def test_samples_wait_for_a_process_and_lose_no_time(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six no more than two have one at once; all are played, also those that waited longer than an episode has."""
    async with counting_others(tmp_path, max_processes=2) as registry:
        player = make_player(renderer, LatePolicy(renderer, monkeypatch), environments=registry)
        prompt = make_prompt("CountsOthers", limits=Limits(episode_timeout_s=100.0))
        episodes = await asyncio.gather(*(play(player, prompt, number) for number in range(6)))
    assert [(episode.finish_reason, episode.reward) for episode in episodes] == [("stop", 1.0)] * 6
    assert len(list(tmp_path.iterdir())) == 6
    assert max(episode.trajectory.turns[-1].metrics["num_living"] for episode in episodes) <= 2


async def test_a_group_is_played_with_fewer_processes_than_samples(renderer: Renderer, tmp_path: Path) -> None:
    """One after another, however many begin."""
    async with counting_others(tmp_path, max_processes=1) as registry:
        policy = ScriptedPolicy(renderer, [("stop" + END, 4)] * 3)
        player = make_player(renderer, policy, environments=registry)
        prompt, shelf = make_prompt("CountsOthers"), ImageShelf()
        await shelf.put(prompt.id.scope, PICTURE)
        images, shared = await GroupImages.load(shelf, prompt), SharedRendering()
        async with Closings() as closings:
            playing = (player.play(prompt, number, images, shared, closings) for number in range(3))
            episodes = await asyncio.gather(*playing)
    assert [episode.trajectory.turns[-1].metrics["num_living"] for episode in episodes] == [1.0] * 3
