"""Whole episodes whose environment runs in a process of its own."""

import asyncio
from pathlib import Path

import pytest

from penstock.model.chat_template import Renderer
from penstock.records import Limits
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episode import Episode
from tests.support.worker.hosted_episodes import HERE
from tests.support.worker.scripted_episodes import END, ScriptedPolicy, make_player, make_prompt, play


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The tiny model's renderer."""
    return Renderer.load(tiny_model_path)


@pytest.mark.parametrize(
    ("kind", "finish_reason", "reason"),
    [
        ("Segfaults", "error", "environment 'Segfaults': its process was ended by SIGSEGV during step"),
        ("NotANumber", "error", "environment 'NotANumber': step raised ValueError: reward = nan"),
        ("LongWinded", "error", "environment 'LongWinded': step: the text of an observation has 10000000 characters"),
        ("Sleeps", "deadline", ""),
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
            limits = Limits(episode_timeout_s=4.0) if name == "Sleeps" else Limits()
            return await play(player, make_prompt(name, limits=limits))

        bad, good = await asyncio.gather(play_with(kind), play_with("Echo"))
    assert bad.finish_reason == finish_reason
    assert bad.error.startswith(reason)
    assert len(bad.to_sample(None).sequences[0].token_ids) > 0
    assert (good.finish_reason, good.reward) == ("stop", 1.0)
