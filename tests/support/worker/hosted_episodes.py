"""Plays with hosted environments, without a policy."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.environments import AssistantTurn, Task
from penstock.errors import PenstockError
from penstock.records import ImagePart, Message, TextPart, Verdict
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.waiting import until
from tests.support.worker import hosted_environments

HERE = hosted_environments.__name__


@contextlib.asynccontextmanager
async def environment_of(kind: str, remaining_s: float = 60.0, **table: Any) -> AsyncIterator[tuple[Any, Task]]:
    """An environment of class `kind` and a task for it; it is closed at the end."""
    tables = {"mine": {"class": f"{HERE}:{kind}", **table}}
    async with EnvironmentRegistry(WorkerConfig(environments=tables).environments) as registry:
        environment = registry.find("mine")()
        try:
            yield environment, make_task(remaining_s)
        finally:
            await environment.close()


def make_task(remaining_s: float = 60.0) -> Task:
    """A task with a picture, whose grade takes "3" for right."""

    async def grade(text: str) -> Verdict:
        if text == "fail":
            raise PenstockError("no reward service answers")
        return Verdict(score=float(text == "3"), status="OK", extracted=text, method="EXACT")

    return Task(
        id="run/0/0/a/0",
        seed=2**64 - 1,
        messages=(Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x."))),),
        images=(b"\x89PNG picture",),
        golds=("3",),
        extra={"level": [1, None]},
        remaining_s=lambda: remaining_s,
        grade=grade,
    )


async def play_on(environment: Any, folder: Path) -> list[str]:
    """What a `GivesUp` of `folder` shows, whose first verdict comes after it has stopped waiting for it: with and
    without another question, and when it has played both."""
    asked, gave_up = folder / "asked", folder / "gave_up"

    async def grade(text: str) -> Verdict:
        assert text != "unwanted", "nobody waits for it"
        if text == "slow":
            asked.touch()
            await until(gave_up.exists)
        return Verdict(score=float(text == "3"), status="OK", extracted=text, method="EXACT")

    await environment.reset(dataclasses.replace(make_task(), grade=grade))
    shown = []
    for text in ("", "3", ""):
        shown.append(text_of(await environment.step(turn(text))))
        asked.unlink()
        gave_up.unlink()
    return shown


def turn(text: str) -> AssistantTurn:
    """A turn of the policy."""
    return AssistantTurn(text=text)


def text_of(result: Any) -> str:
    """All text of an observation, or of a result's."""
    observation = getattr(result, "observation", result)
    return " ".join(part.text for message in observation.messages for part in message.parts if hasattr(part, "text"))


def pid_of(observation: Any) -> int:
    """The process that an observation names."""
    return int(text_of(observation).partition("pid=")[2].split()[0])


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or only its entry in the process table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
