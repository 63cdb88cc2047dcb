"""Plays lines of scripted turns: {"id", "gold", "max_turns", "responses"} in, {"id", "steps"} out, one at a time."""

import asyncio
import dataclasses
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.environments import AssistantTurn, EnvironmentFactory, StepResult
from penstock.errors import DataError, InvalidRequestError, PenstockError
from penstock.records import Message, TextPart
from services.cli.environment.grading import Grading
from services.cli.environment.tasks import Subject
from services.cli.json_lines import (
    MAX_LINE_BYTES,
    encode,
    read_golds,
    read_id,
    read_object,
    read_text,
    shown,
    write_all,
)
from services.rollout.worker.episodes.noted_grade import NotedGrade

_EXAMPLE = '{"id": ..., "gold": ..., "max_turns": ..., "responses": [...]}'
_EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A line: a task, and the policy's text in each turn."""

    id: str | int
    subject: Subject
    max_turns: int | None
    """The most turns; None: the environment's own limit."""
    responses: tuple[str, ...]


def play(
    source: Path | None,
    factory: EnvironmentFactory,
    graders: Grading,
    runner: asyncio.Runner,
    *,
    profile: str,
    max_turns: int | None,
    timeout_s: float,
) -> int:
    """Play the lines of `source` (None: standard input), and write one line for each; return the exit code.

    Args:
        source: The file.
        factory: Makes the environment of each line.
        graders: Grade answers.
        runner: Runs the environments.
        profile: The reward profile of lines without one.
        max_turns: The limit for lines without one.
        timeout_s: The most seconds that the environment may take for one line.

    Raises:
        DataError: the file cannot be read, a line is wrong, or the environment takes too long for one; the lines before
            it are played and written. Or standard output cannot be written.
        PenstockError: an answer was not judged.
    """
    name = str(source or "<stdin>")
    with _reading(source) as reading:
        for number, text in enumerate(_texts(reading), start=1):
            if text is not None and not text.strip():
                continue
            try:
                script = parse(text, is_first=number == 1, profile=profile, max_turns=max_turns)
            except ValueError as error:
                raise DataError(f"{name}:{number}: {error}") from None
            try:
                steps = runner.run(_play(script, factory, graders, timeout_s))
            except InvalidRequestError as error:
                raise DataError(f"{name}:{number}: {error}") from None
            except PenstockError as error:
                raise type(error)(f"{name}:{number}: {error}") from None
            try:
                write_all(1, encode({"id": script.id, "steps": steps}))
            except BrokenPipeError:  # the reader has left, as in `| head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                return _EXIT_BROKEN_PIPE
            except OSError as error:
                raise DataError(
                    f"{name}:{number}: its steps cannot be written to standard output: {error.strerror}; make room, or "
                    "write to another file"
                ) from None
    return 0


def parse(text: bytes | None, *, is_first: bool, profile: str, max_turns: int | None) -> Script:
    """Parse a line; None is a line that is too long.

    Raises:
        ValueError: the line is wrong; says which field, its value and the remedy.
    """
    fields = read_object(text, is_first=is_first, example=_EXAMPLE)
    if "gold" not in fields:
        raise ValueError('field "gold" is missing; give the gold answer, a string or a list of strings')
    question = read_text(fields, "question", default="")
    return Script(
        id=read_id(fields),
        subject=Subject(
            id=str(fields["id"]),
            messages=(Message(role="user", parts=(TextPart(text=question),)),),
            golds=tuple(read_golds(fields, "gold")),
            profile=read_text(fields, "profile", default=profile),
        ),
        max_turns=_max_turns(fields, max_turns),
        responses=_responses(fields),
    )


async def _play(
    script: Script, factory: EnvironmentFactory, graders: Grading, timeout_s: float
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    task = script.subject.to_task(graders, profile=None, max_turns=script.max_turns)
    noted = NotedGrade(task.grade)
    environment = factory()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            try:
                await environment.reset(dataclasses.replace(task, grade=noted.grade))
                for response in script.responses[: script.max_turns]:
                    result = await environment.step(AssistantTurn.parse(response))
                    if (unjudged := noted.take_unjudged()) and result.reward is not None:
                        raise PenstockError(f"a reward may rest on an answer that was not judged: {unjudged}")
                    steps.append(_shown_step(result))
                    if result.observation is None:
                        break
            finally:
                await environment.close()
    except TimeoutError:
        if not limit.expired():
            raise
        raise DataError(
            f"the environment took longer than {timeout_s:g} s; raise --worker.episode_timeout_s, or repair it"
        ) from None
    return steps


def _shown_step(result: StepResult) -> dict[str, Any]:
    return {
        "kind": result.kind or None,
        "done": result.observation is None,
        "score": result.metrics.get("score", result.reward),
    }


def _max_turns(fields: dict[str, Any], default: int | None) -> int | None:
    value = fields.get("max_turns", default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f'field "max_turns" = {shown(value)} is not a number of turns; give an integer >= 1')
    return value


def _responses(fields: dict[str, Any]) -> tuple[str, ...]:
    if "responses" not in fields:
        raise ValueError('field "responses" is missing; give the texts of the policy\'s turns, a list of strings')
    values = fields["responses"]
    if not isinstance(values, list):
        raise ValueError(f'field "responses" = {shown(values)} is not a list; write the turns as a list of strings')
    return tuple(read_text({"responses": value}, "responses") for value in values)


def _texts(reading: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield lines as they arrive; None for a line that is too long, whose rest is skipped."""
    while line := reading.readline(MAX_LINE_BYTES + 1):
        is_too_long = len(line) > MAX_LINE_BYTES
        while is_too_long and line and not line.endswith(b"\n"):
            line = reading.readline(MAX_LINE_BYTES)
        yield None if is_too_long else line


def _reading(path: Path | None) -> io.BufferedReader:
    try:
        return io.BufferedReader(io.FileIO(0 if path is None else path, "rb", closefd=path is not None))
    except OSError as error:
        raise DataError(f"{path or 'standard input'} cannot be read: {error.strerror}; give a file of lines") from None
