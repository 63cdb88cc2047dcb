"""Environments are found by name."""

import importlib.metadata
from typing import Any, ClassVar

import pytest

from penstock.environments import Observation
from penstock.errors import ConfigError, InvalidRequestError
from penstock.records import ImagePart, Message
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.environments.single_turn import SingleTurn

HERE = "services.rollout.worker.environments.single_turn:SingleTurn"


def test_the_built_in_environment_is_there() -> None:
    """No configuration is needed for single turns."""
    assert EnvironmentRegistry().find("single_turn") is SingleTurn


def test_a_user_adds_an_environment_by_its_path() -> None:
    """Under a name of their own."""
    assert EnvironmentRegistry(WorkerConfig(environments={"mine": HERE}).environments).find("mine") is SingleTurn


def test_an_installed_package_adds_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry-point group penstock.environments."""
    point = importlib.metadata.EntryPoint(name="theirs", value=HERE, group="penstock.environments")
    monkeypatch.setattr(
        "services.rollout.worker.environments.config.entry_points",
        lambda *, group: [point] if group == point.group else [],
    )
    assert EnvironmentRegistry().find("theirs") is SingleTurn


@pytest.mark.parametrize("path", ["no.such.module:X", f"{HERE}s", "services", "penstock.errors:__doc__"])
def test_a_path_that_names_no_class_is_a_mistake_in_the_recipe(path: str) -> None:
    """The message shows the path and what one looks like."""
    with pytest.raises(ConfigError, match=r"environment mine: .*package\.module:Class"):
        EnvironmentRegistry(WorkerConfig(environments={"mine": path}).environments)


def test_a_prompt_cannot_name_code_to_import() -> None:
    """A path where a name belongs is just an unknown name."""
    with pytest.raises(InvalidRequestError, match="is unknown"):
        EnvironmentRegistry().find(HERE)


def test_an_observation_brings_the_images_that_it_shows() -> None:
    """Indices count from 0 within the observation."""
    shown = Message(role="user", parts=(ImagePart(index=0),))
    with pytest.raises(ValueError, match=r"refer to images \[0\], but the observation brings 0"):
        Observation(messages=(shown,))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_observation_s_images_are_bytes(kind: Any) -> None:
    """Whatever held them: they are compared and stored by their content."""
    message = Message(role="user", parts=(ImagePart(index=0),))
    images: Any = [kind(b"1")]
    assert Observation(messages=(message,), images=images).images == (b"1",)


@pytest.mark.parametrize(("image", "name"), [("a.png", "str"), (5, "int")])
def test_an_observation_s_image_that_is_no_file_is_refused(image: Any, name: str) -> None:
    """With its place and what to give instead."""
    message = Message(role="user", parts=(ImagePart(index=0),))
    with pytest.raises(ValueError, match=rf"images\[0\] is a {name}; give the bytes of an encoded file"):
        Observation(messages=(message,), images=(image,))


class Prepared(SingleTurn):
    """Loads something once."""

    given: ClassVar[list[str]] = []

    def __init__(self, path: str) -> None:
        pass

    @classmethod
    def prepare(cls, path: str) -> None:
        cls.given.append({"good": "good"}[path])


def test_a_class_prepares_once_for_all_episodes() -> None:
    """With its own arguments, when the registry is made; making environments does not repeat it."""
    Prepared.given.clear()
    tables = {"mine": {"class": f"{__name__}:Prepared", "args": {"path": "good"}}}
    registry = EnvironmentRegistry(WorkerConfig(environments=tables).environments)
    registry.find("mine")()
    registry.find("mine")()
    assert Prepared.given == ["good"]


def test_a_class_that_cannot_prepare_is_a_mistake_in_the_recipe() -> None:
    """The message has what it raised."""
    tables = {"mine": {"class": f"{__name__}:Prepared", "args": {"path": "bad"}}}
    with pytest.raises(ConfigError, match=r"environment mine: Prepared\.prepare raised KeyError: 'bad'"):
        EnvironmentRegistry(WorkerConfig(environments=tables).environments)


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("geo3k_tools", {"max_turns": 0}, "max_turns = 0 must be at least 1"),
        ("geo3k_tools", {"max_turns": "3"}, "TypeError"),
        ("geo3k_zoom", {"unit": "inch"}, "unit = 'inch' must be one of fraction, thousandth"),
        ("geo3k_zoom", {"tools": ["abacus"]}, r"\['abacus'\] are unknown; known: calculator, python"),
        ("calculator", {"max_turns": 0}, "max_turns = 0 must be at least 1"),
        ("python", {"time_limit_s": 0}, "time_limit_s = 0 must be above 0"),
        (
            "python",
            {"modules": ["math", "no_such_module", "no_such_package.part"]},
            "modules has no_such_module, no_such_package.part, not installed here; install .* or leave them out",
        ),
    ],
)
def test_a_wrong_argument_of_a_built_in_environment_is_a_mistake_in_the_recipe(
    name: str, args: dict[str, Any], reason: str
) -> None:
    """It is found at the start: otherwise every group would fail."""
    with pytest.raises(ConfigError, match=f"environment {name}: .*{reason}"):
        EnvironmentRegistry(WorkerConfig(environments={name: {"args": args}}).environments)
