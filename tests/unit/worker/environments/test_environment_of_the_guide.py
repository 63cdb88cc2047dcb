"""The environment of examples/environment, which docs/rollouts/environments.md shows."""

from typing import Any

import pytest

from penstock.model.chat.chat_template import Renderer
from penstock.v1 import reward_pb2
from tests.conftest import ROOT
from tests.support.worker.scripted_episodes import END, ScriptedPolicy, make_player, make_prompt, play
from tests.support.worker.verifiers import Boxes

FOLDER = ROOT / "examples" / "environment"


@pytest.fixture
def second_chance(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where workers find it."""
    monkeypatch.syspath_prepend(FOLDER)
    return "second_chance:SecondChance"


def test_the_guide_shows_the_example() -> None:
    """Line for line."""
    page = (ROOT / "docs" / "rollouts" / "environments.md").read_text()
    assert f"```python\n{(FOLDER / 'second_chance.py').read_text()}```\n" in page


@pytest.mark.parametrize(
    ("said", "reward", "metrics"),
    [
        (["\\boxed{3}"], 1.0, {"first_attempt": 1.0}),
        (["\\boxed{4}", "\\boxed{3}"], 0.5, {"first_attempt": 0.0}),
        (["\\boxed{4}", "\\boxed{5}"], 0.0, {"first_attempt": 0.0}),
    ],
)
async def test_the_environment_of_the_guide_plays(
    renderer: Renderer, second_chance: str, said: list[str], reward: float, metrics: dict[str, Any]
) -> None:
    """It is told of a wrong answer once, and what it does then counts half."""
    policy = ScriptedPolicy(renderer, [(text + END, 4) for text in said])
    player = make_player(renderer, policy, verifier=Boxes(), environments={"second_chance": second_chance})
    episode = await play(player, make_prompt("second_chance"))
    sample = episode.to_sample(None)
    assert (sample.reward, sample.metrics, len(sample.turns)) == (reward, metrics, len(said))
    assert ("That is wrong. Look again." in renderer.decode(episode.trajectory.token_ids)) == (len(said) == 2)


async def test_an_answer_that_was_not_judged_is_not_called_wrong(renderer: Renderer, second_chance: str) -> None:
    """Its sample ends unjudged, with no second chance at half the reward."""
    policy = ScriptedPolicy(renderer, [("\\boxed{3}" + END, 4)] * 2)
    verifier = Boxes(status=reward_pb2.VERDICT_STATUS_TIMEOUT)
    player = make_player(renderer, policy, verifier=verifier, environments={"second_chance": second_chance})
    sample = (await play(player, make_prompt("second_chance"))).to_sample(None)
    assert (len(sample.turns), sample.reward, sample.metrics) == (1, None, {})
    assert "verdict TIMEOUT" in sample.error
