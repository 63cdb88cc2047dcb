"""Environments of plain functions, good and bad, for tests of where environments run."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from penstock.environments import AssistantTurn, BlockingTask, Observation, StepResult, Task
from penstock.errors import InvalidRequestError, UnavailableError
from penstock.records import ImagePart, Message, TextPart
from tests.support.processes import is_alive

SLEEPER = "3141592"
"""Seconds that a stray process of `StartsProcesses` sleeps, by which tests find it."""

ERRORS = {
    "bug": RuntimeError("no board"),
    "away": ConnectionRefusedError("the tool server is away"),
    "full": UnavailableError("no board is free"),
    "wrong": InvalidRequestError("the row has no board"),
}
"""What `CannotBegin` raises."""


def say(text: str, *images: bytes) -> Observation:
    """An observation of one message."""
    shown = tuple(ImagePart(index=number) for number in range(len(images)))
    return Observation(messages=(Message(role="user", parts=(TextPart(text=text), *shown)),), images=images)


class Echo:
    """Says what it hears, shows the task's images, and gives a reward at "stop"."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.heard: list[str] = []

    def reset(self, task: BlockingTask) -> Observation:
        """The greeting, the task's own text, and this process's number."""
        self.task = task
        return Observation(
            messages=(
                *task.messages,
                Message(role="user", parts=(TextPart(text=f"{self.greeting} pid={os.getpid()} {task.extra}"),)),
            ),
            images=task.images,
            tools=task.tools,
        )

    def step(self, turn: AssistantTurn) -> StepResult:
        """An echo; "stop" ends, "grade ..." asks for a verdict, "time" says what is left."""
        self.heard.append(turn.text)
        if turn.text == "stop":
            return StepResult(observation=None, reward=float(len(self.heard)), metrics={"heard": len(self.heard)})
        if turn.text.startswith("grade "):
            verdict = self.task.grade(turn.text.removeprefix("grade "))
            return StepResult(observation=say(f"{verdict.status} {verdict.score}"))
        if turn.text == "time":
            return StepResult(observation=say(str(self.task.remaining_s())))
        return StepResult(observation=say(f"{turn.text} {[call.arguments for call in turn.calls]}"))

    def close(self) -> None:
        """Nothing is held."""


class StuckInStep(Echo):
    """Holds the interpreter's lock for ever."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Asks what "stuck" is worth, then never returns."""
        self.task.grade("stuck")
        ctypes.PyDLL(None).pause()
        raise AssertionError


class Leaves:
    """Ends its program as argparse does, which is the server's own where it is not blocking."""

    async def reset(self, task: Task) -> Observation:
        """Leave."""
        raise SystemExit(2)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """There is no first turn."""
        raise AssertionError

    async def close(self) -> None:
        """Leave once more."""
        raise SystemExit(2)


class GivesUp:
    """Stops waiting for two verdicts as soon as the first question has arrived, which a file `asked` in its folder
    says, and before the second one has been asked."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def reset(self, task: Task) -> Observation:
        """The task's own."""
        self.task = task
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Leaves a file `gave_up`, and plays on: with another question if the policy says one."""
        asking = asyncio.create_task(self.task.grade("slow"))
        while not (self.folder / "asked").exists():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(self.task.grade("unwanted"))
        await asyncio.sleep(0)  # it begins
        asking.cancel()
        waiting.cancel()
        await asyncio.wait({asking, waiting})
        (self.folder / "gave_up").touch()
        if not turn.text:
            return StepResult(observation=say("played on"))
        return StepResult(observation=say(f"{turn.text} {(await self.task.grade(turn.text)).score}"))

    async def close(self) -> None:
        """Nothing is held."""


class CountsOthers(Echo):
    """Measures how many episodes have a process, by files that they leave in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def reset(self, task: BlockingTask) -> Observation:
        """Counts from here on."""
        (self.folder / str(os.getpid())).touch()
        return Observation(messages=task.messages, images=task.images)

    def step(self, turn: AssistantTurn) -> StepResult:
        """The end."""
        num_living = sum(is_alive(int(file.name)) for file in self.folder.iterdir())
        return StepResult(observation=None, reward=1.0, metrics={"num_living": num_living})


class Sleeps(Echo):
    """Takes much longer than any episode."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """An hour."""
        time.sleep(3600)
        raise AssertionError


class StuckInReset(Echo):
    """Its episode never begins."""

    def reset(self, task: BlockingTask) -> Observation:
        """Asks what "stuck" is worth, then never returns."""
        task.grade("stuck")
        time.sleep(3600)
        raise AssertionError


class StuckInClose(Echo):
    """Does not let go."""

    def close(self) -> None:
        """Never returns."""
        time.sleep(3600)


class Exits(Echo):
    """Ends its process."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Without a word to the worker."""
        sys.stderr.write("giving up\n")
        os._exit(7)


class LeavesBySystemExit(Echo):
    """Calls sys.exit, as a script does."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Raises SystemExit."""
        sys.exit(3)


class Segfaults(Echo):
    """Reads memory that it does not have."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Is ended by the kernel."""
        ctypes.string_at(0)
        raise AssertionError


class Raises(Echo):
    """Has a bug."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Raises."""
        raise KeyError("board")


class Chatty(Echo):
    """Prints much more than any pipe holds."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Prints 20 MB, then answers."""
        for _ in range(20):
            sys.stdout.write("x" * 2**20)
        return StepResult(observation=say("done"))


class DropsOutput(Echo):
    """Does with standard output and standard error what a program does that wants to be quiet."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Closes or unsets the streams that the turn names, and may then end its process by an interrupt."""
        how, names, *then = turn.text.split()
        for name in names.split(","):
            if how == "close":
                getattr(sys, name).close()
            else:
                setattr(sys, name, None)
        if then:
            raise KeyboardInterrupt
        return StepResult(observation=say("done"))


class NotANumber(Echo):
    """Measures nothing, and says so in the wrong way."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """A reward that no trainer can use."""
        return StepResult(observation=None, reward=float("nan"))


class Forgetful(Echo):
    """Returns nothing at all."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """None, whatever its type says."""
        return None  # type: ignore[return-value]


class LongWinded(Echo):
    """Its observation has 10 MB of text."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Far more than any context takes."""
        return StepResult(observation=say("word " * 2_000_000))


class HugePicture(Echo):
    """Its observation has an image of 200 MB."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Of zeros."""
        return StepResult(observation=say("look", bytes(200 * 2**20)))


class StartsProcesses(Echo):
    """Starts a program that would go on for weeks."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Says its process id; "exit" leaves it alone, and "interrupt" says how another ends that interrupts itself."""
        if turn.text == "exit":
            os._exit(0)
        if turn.text == "interrupt":
            return StepResult(observation=say(str(subprocess.run(["sh", "-c", "kill -INT $$"]).returncode)))
        return StepResult(observation=say(str(subprocess.Popen(["sleep", SLEEPER]).pid)))


class Curious(Echo):
    """Looks for secrets."""

    def step(self, turn: AssistantTurn) -> StepResult:
        """Says its environment variables, and its parent's as the kernel shows them."""
        parents = Path(f"/proc/{os.getppid()}/environ").read_text()
        return StepResult(observation=say(f"{dict(os.environ)} {parents}"))


class Remembers(Echo):
    """Writes down that it was closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        """Leave a file."""
        Path(self.path).write_text("closed")


class AsyncEcho:
    """The same as coroutine functions."""

    async def reset(self, task: Task) -> Observation:
        """A greeting."""
        self.task = task
        return say(f"hello pid={os.getpid()}")

    async def step(self, turn: AssistantTurn) -> StepResult:
        """The verdict on what it heard."""
        verdict = await self.task.grade(turn.text)
        return StepResult(observation=say(f"{verdict.status} {verdict.score}"))

    async def close(self) -> None:
        """Nothing is held."""


class CannotBegin(AsyncEcho):
    """Raises the error that the task names in its reset."""

    async def reset(self, task: Task) -> Observation:
        """No observation."""
        raise ERRORS[task.extra["error"]]


class SaysHalfAnEmoji(AsyncEcho):
    """Shows the policy what no message can carry."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        """A surrogate by itself."""
        return StepResult(observation=say("\ud83d"))


class KillsItsServer(AsyncEcho):
    """Runs in the server's own process, and kills it in the first step of two episodes."""

    have_begun: ClassVar[list["KillsItsServer"]] = []
    both: ClassVar[asyncio.Event] = asyncio.Event()

    async def reset(self, task: Task) -> Observation:
        """The task as it is."""
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """kill -9, once both have had a turn: an answer to a reset is on its way until then."""
        self.have_begun.append(self)
        if len(self.have_begun) == 2:
            self.both.set()
        await self.both.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class HalfAsync(AsyncEcho):
    """Cannot decide."""

    def close(self) -> None:  # type: ignore[override]
        """Plain, unlike the others."""
