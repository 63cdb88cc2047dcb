"""Other libraries' environments, named in a recipe, play episodes in processes of their own."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.bus.image_store import hash_of
from penstock.environments.pictures import read_picture
from penstock.errors import ConfigError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Sampling
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.foreign import env_skyrl, env_slime, env_trl
from tests.support.worker.scripted_episodes import END, PICTURE, ScriptedPolicy, make_player, make_prompt, play
from tests.support.worker.verifiers import Boxes

ADAPTERS = "penstock.environments.adapters"
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def table(kind: str, **args: Any) -> dict[str, Any]:
    """What a recipe has under [worker.environments]."""
    return {"class": f"{ADAPTERS}:{kind}", "args": args}


def png(*color: int) -> bytes:
    """The file of a picture that an environment makes as a PIL image."""
    return read_picture(Image.new("RGB", (4, 3), color), "x")


SLIME = table("SlimeEnvironment", env=env_slime.__file__, config={"max_turns": 2, "size": 7})
SKYRL = table("SkyRLEnvironment", env=f"{env_skyrl.__name__}:Guess", config={"max_turns": 2})
TRL = table("TRLEnvironment", env=f"{env_trl.__file__}:Counter", args={"start": 3})


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The tiny model's renderer."""
    return Renderer.load(tiny_model_path)


@pytest.mark.parametrize(
    ("environment", "said", "reward", "metrics", "told", "picture"),
    [
        (SLIME, ["4", "3"], None, {"score": 1.0, "tool_executed": 1.0, "truncated": 0.0}, "Wrong.", png(255, 1, 0)),
        (SKYRL, ["4", "3"], 1.0, {"steps": 2.0}, "Again.", PICTURE),
        (
            TRL,
            [CALL, "Done."],
            1.0,
            {"num_calls": 1.0, "tool_use": 1.0, "num_failed_calls": 0.0},
            "the counter",
            png(3, 0, 0),
        ),
    ],
    ids=["slime", "skyrl", "trl"],
)
async def test_a_class_of_another_library_plays_an_episode(
    renderer: Renderer,
    environment: Mapping[str, Any],
    said: list[str],
    reward: float | None,
    metrics: dict[str, float],
    told: str,
    picture: bytes,
) -> None:
    """The policy goes on behind what it said; text and picture of the observation reach it, and rewards are the
    environment's, or the reward service's where it gives none."""
    policy = ScriptedPolicy(renderer, [(text + END, 4) for text in said])
    async with EnvironmentRegistry(WorkerConfig(environments={"mine": environment}).environments) as registry:
        player = make_player(renderer, policy, environments=registry, verifier=Boxes())
        sampling = Sampling(temperature=1.0, max_new_tokens=64)
        prompt = make_prompt("mine", extra={"picture": URL, "target": 3}, sampling=sampling)
        episode = await play(player, prompt)
    sample = episode.to_sample(None)
    assert (episode.error, episode.finish_reason, sample.reward, sample.metrics) == ("", "stop", reward, metrics)
    assert episode.needs_verdict == (reward is None)
    first, second = policy.requests
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert told in renderer.decode(list(second.input_ids)[len(first.input_ids) :])
    shown = [reference.stored.sha256 for reference in second.images]
    assert shown == [hash_of(PICTURE), hash_of(picture)]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (table("SlimeEnvironment", env="no/env.py"), r'environment mine: env = "no/env.py": there is no file /'),
        (table("SlimeEnvironment", file="env.py"), r"environment mine: args = \{file = 'env.py'\} do not fit Slime"),
        (table("SkyRLEnvironment", env="no_such_package:Env"), "environment mine: .* install no_such_package where"),
        (table("TRLEnvironment", env="json:Env"), r'environment mine: env = "json:Env": .* has no \'Env\''),
    ],
)
async def test_a_mistake_in_the_recipe_is_known_before_the_first_episode(
    environment: Mapping[str, Any], reason: str
) -> None:
    """When the worker starts, with the environment's name and the remedy."""
    with pytest.raises(ConfigError, match=reason):
        async with EnvironmentRegistry(WorkerConfig(environments={"mine": environment}).environments):
            pass


async def test_a_file_is_imported_once_for_all_episodes(renderer: Renderer, tmp_path: Path) -> None:
    """Before the first of them, because such files import much."""
    (tmp_path / "env_counted.py").write_text(
        f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\nfrom tests.support.foreign.env_slime import build_env\n"
    )
    tables = {"mine": table("SlimeEnvironment", env=str(tmp_path / "env_counted.py"), config={"max_turns": 2})}
    async with EnvironmentRegistry(WorkerConfig(environments=tables).environments) as registry:
        assert (tmp_path / "imports").read_text() == "."
        for _ in range(2):
            policy = ScriptedPolicy(renderer, [("3" + END, 4)])
            await play(make_player(renderer, policy, environments=registry), make_prompt("mine"))
    assert (tmp_path / "imports").read_text() == "."


async def test_an_environment_s_own_error_says_where_it_was_raised(renderer: Renderer) -> None:
    """The sample ends with class, file and line; it keeps its tokens."""
    policy = ScriptedPolicy(renderer, [("crash" + END, 4)])
    async with EnvironmentRegistry(WorkerConfig(environments={"mine": SLIME}).environments) as registry:
        episode = await play(make_player(renderer, policy, environments=registry), make_prompt("mine"))
    assert episode.finish_reason == "error"
    assert "environment 'mine': step raised KeyError: 'board' (env_slime.py, line " in episode.error
