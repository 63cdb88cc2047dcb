"""Plays an environment with a person as the policy: shows the policy's input, and reads its turns."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.environments import AssistantTurn, EnvironmentFactory, Observation, Task
from penstock.errors import SetupError
from penstock.records import ImagePart, Message, ToolCall
from services.rollout.worker.episodes.noted_grade import NotedGrade

_END_OF_TURN = "."
_SUFFIXES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif"}


def play(task: Task, factory: EnvironmentFactory, runner: asyncio.Runner, *, pictures: Path | None) -> int:
    """Play one episode of `task` on the terminal, for at most its `max_turns`; return the exit code.

    Raises:
        SetupError: `pictures` cannot be written.
        PenstockError: the environment raised it, or the reward service refuses to grade the last turn.
    """
    table = _Table(pictures)
    noted = NotedGrade(task.grade)
    environment = factory()
    try:
        table.show(runner.run(environment.reset(dataclasses.replace(task, grade=noted.grade))))
        rewards: list[float] = []
        num_turns, last_turn = 0, ""
        while task.max_turns is None or num_turns < task.max_turns:
            text = _read_turn(num_turns + 1)
            if text is None:
                table.say(f"left after {num_turns} turns")
                return 0
            num_turns, last_turn = num_turns + 1, text
            result = runner.run(environment.step(AssistantTurn.parse(text)))
            rewards += [] if result.reward is None else [result.reward]
            table.say(
                f"{result.kind or 'step'}: reward {_number(result.reward)}"
                + "".join(f", {name} {value:g}" for name, value in result.metrics.items())
            )
            if (unjudged := noted.take_unjudged()) and result.reward is not None:
                table.say(f"the episode ended, unjudged: the reward may rest on an answer that was not ({unjudged})")
                return 0
            if result.observation is None:
                ending = f"the episode ended{' (cut short)' if result.truncated else ''}"
                break
            table.show(result.observation)
        else:
            ending = f"the episode has no further turn (max_turns = {task.max_turns})"
        table.say(f"{ending}; {runner.run(_worth(rewards, task, last_turn))}")
        return 0
    finally:
        runner.run(environment.close())


async def _worth(rewards: Sequence[float], task: Task, last_turn: str) -> str:
    """Return what the episode is worth in training, in words: its steps' rewards, or else the last turn's verdict."""
    if rewards:
        return f"reward in all {sum(rewards):g}"
    if not task.golds:
        return "no reward; with --gold ANSWER the reward service judges the last turn"
    verdict = await task.grade(last_turn)
    if not verdict.is_judged:
        return f"the last turn was not judged ({verdict.status})"
    return f"the reward service gives the last turn {verdict.score:g} ({verdict.status})"


class _Table:
    """Shows observations, and saves their pictures numbered through the episode."""

    def __init__(self, pictures: Path | None) -> None:
        self._folder = pictures
        self._num_shown = 0

    def show(self, observation: Observation) -> None:
        """Print the messages, after the tools that the policy may call, in the order in which templates write them."""
        if observation.tools:
            self.say("tools")
            for tool in observation.tools:
                sys.stdout.write(f"{json.dumps(tool, ensure_ascii=False)}\n")
        for message in observation.messages:
            self.say(message.role)
            sys.stdout.write("".join(self._shown(message, observation.images)) + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Print a line of the command itself."""
        sys.stdout.write(f"--- {text}\n")
        sys.stdout.flush()

    def _shown(self, message: Message, images: Sequence[bytes]) -> list[str]:
        texts = [
            self._picture(images[part.index]) if isinstance(part, ImagePart) else part.text for part in message.parts
        ]
        return texts + [_call(call) for call in message.tool_calls]

    def _picture(self, data: bytes) -> str:
        number, self._num_shown = self._num_shown, self._num_shown + 1
        if self._folder is None:
            return f"[picture {number}, {len(data)} bytes; --pictures FOLDER saves it]\n"
        suffix = next((suffix for magic, suffix in _SUFFIXES.items() if data.startswith(magic)), "image")
        file = self._folder / f"{number}.{suffix}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:
            raise SetupError(f"--pictures {self._folder} cannot be written: {error.strerror}; choose another") from None
        return f"[picture {number}: {file}]\n"


def _read_turn(number: int) -> str | None:
    """Return the typed turn, up to a line with only a full stop; None if the input ends without a turn."""
    if sys.stdin.isatty():
        sys.stdout.write(f'--- your turn {number}; a line with "{_END_OF_TURN}" alone ends it, Ctrl-D leaves\n')
        sys.stdout.flush()
    lines: list[str] = []
    for line in sys.stdin:
        if line.rstrip("\r\n") == _END_OF_TURN:
            return "\n".join(lines)
        lines.append(line.rstrip("\r\n"))
    return "\n".join(lines) if lines else None


def _call(call: ToolCall) -> str:
    return f"\n[call {json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}]"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
