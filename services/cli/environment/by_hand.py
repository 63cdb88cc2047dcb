"""Plays an environment with a person as the policy: shows the policy's input, and reads its turns."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.environments import AssistantTurn, EnvironmentFactory, Observation, Task
from penstock.errors import SetupError
from penstock.records import ImagePart, Message, ToolCall

_END_OF_TURN = "."
_SUFFIXES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif"}


def play(task: Task, factory: EnvironmentFactory, runner: asyncio.Runner, *, pictures: Path | None) -> int:
    """Play one episode of `task` on the terminal, for at most its `max_turns`; return the exit code.

    Raises:
        SetupError: `pictures` cannot be written.
        PenstockError: the environment raised it.
    """
    table = _Table(pictures)
    environment = factory()
    try:
        table.show(runner.run(environment.reset(task)))
        total, num_turns = 0.0, 0
        while task.max_turns is None or num_turns < task.max_turns:
            text = _read_turn(num_turns + 1)
            if text is None:
                table.say(f"left after {num_turns} turns")
                return 0
            num_turns += 1
            result = runner.run(environment.step(AssistantTurn.parse(text)))
            total += result.reward or 0.0
            table.say(
                f"{result.kind or 'step'}: reward {_number(result.reward)}"
                + "".join(f", {name} {value:g}" for name, value in result.metrics.items())
            )
            if result.observation is None:
                table.say(f"the episode ended{' (cut short)' if result.truncated else ''}; reward in all {total:g}")
                return 0
            table.show(result.observation)
        table.say(f"the episode has no further turn (max_turns = {task.max_turns}); reward in all {total:g}")
        return 0
    finally:
        runner.run(environment.close())


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
