"""A reader who types the commands of a page, in a copy of the checkout."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.docs.steps import NOTHING, Given, NotRun, Page, Run, Save, Shows, Step, Stop, commands_of
from tests.support.documents.blocks import Block
from tests.support.waiting import wait_until

_COMMAND_S = 900.0
_READY_S = 300.0
_END_S = 180.0
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_UNIT = re.compile(r"\b0 (?:s|min|h)\b")
_BARS = re.compile("[▁▂▃▄▅▆▇█]+")


@dataclass(frozen=True, slots=True)
class _Staying:
    """A command that has been typed and has not been seen to end."""

    name: str
    """Where it stands, and the command."""
    process: "subprocess.Popen[bytes]"
    log: Path


class Reader:
    """Goes through a page from top to bottom."""

    def __init__(self, page: Page, folder: Path) -> None:
        self._page, self._folder = page, folder
        self._programs = 0
        self._output = ""
        """What the commands of the last block printed."""
        self._staying = list[_Staying]()
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "COLUMNS": "200",
        }

    def read(self) -> None:
        """Do what the page says."""
        try:
            for step, block in self._page.paired():
                self._do(step, block)
            self._require_staying()
        finally:
            self._stop()

    def _do(self, step: Step, block: Block | None) -> None:
        text = block.text if block is not None else ""
        match step:
            case NotRun():
                return
            case Stop():
                self._require_staying()
                self._stop()
                return
            case Save(name=name):
                (self._folder / name).write_text(text)
                return
            case Shows(but=but, exactly=exactly):
                missing = missing_lines(text, self._output, but, exactly)
                assert not missing, f"{self._place(block)}: {missing[0]!r} is not in\n{self._output}"
                return
            case Given(command=command):
                commands, left_out = [command], []
            case Run(left_out=left):
                commands, left_out = commands_of(text), [*left]
                if block is not None and block.language == "python":
                    commands = [self._program(text)]
        self._output = ""
        for command in map(self._page.command, commands):
            if not any(re.match(start, command) for start in left_out):
                self._type(command, self._place(block))

    def _program(self, text: str) -> str:
        """Put a program beside the checkout; the command that runs it in the checkout."""
        self._programs += 1
        file = self._folder.parent / f"program_{self._programs}.py"
        file.write_text(text)
        return f"python {file}"

    def _place(self, block: Block | None) -> str:
        return f"{self._page.name}:{block.line}" if block is not None else self._page.name

    def _type(self, command: str, place: str) -> None:
        # The checkout's own packages stand before those that the environment was installed from.
        line = re.sub(r"^PYTHONPATH=(\S+)", rf"PYTHONPATH=\1:{shlex.quote(str(self._folder))}", command)
        print(f"{place}: {command}", flush=True)  # noqa: T201 - the test runs for minutes
        ready = next((text for start, text in self._page.stays.items() if re.match(start, command)), None)
        log = self._folder.parent / f"output_{place.rpartition('/')[2]}_{len(self._staying)}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._staying.append(_Staying(f"{place}: {command}", process, log))
        if ready is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_COMMAND_S)
            self._output += log.read_text()
            assert process.returncode == 0, f"{place}: {command} ends with {process.returncode}:\n{self._output}"
            self._staying.pop()
            return
        wait_until(lambda: ready in log.read_text() or process.poll() is not None, _READY_S)
        self._output += log.read_text()
        assert process.poll() is None, f"{place}: {command} has ended with {process.returncode}:\n{self._output}"
        assert ready in self._output, f"{place}: {command} does not say {ready!r}:\n{self._output}"

    def _require_staying(self) -> None:
        """Fail if a command has ended that goes on until the reader stops it."""
        for each in self._staying:
            ended = each.process.poll() is not None
            assert not ended, f"{each.name} has ended with {each.process.returncode}:\n{each.log.read_text()}"

    def _stop(self) -> None:
        """End what stays, the last first, as Ctrl-C does."""
        while self._staying:
            process = self._staying.pop().process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def missing_lines(shown: str, printed: str, but: tuple[str, ...] = (), exactly: str = NOTHING) -> list[str]:
    """The lines of a page that a command did not print, in the page's order, and numbers aside that no match of
    `exactly` has."""
    rest = (_shape(line, exactly) for line in printed.splitlines())
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    return [line for line in lines if not line.startswith(but or "\0") and _shape(line, exactly) not in rest]


def _shape(line: str, exactly: str) -> str:
    parts = re.split(f"({exactly})", line)
    parts[::2] = [_UNIT.sub("0 s", _NUMBER.sub("0", _BARS.sub("", part))) for part in parts[::2]]
    return " ".join("".join(parts).strip("= ").split())


def copy_checkout(folder: Path) -> None:
    """Copy what git knows, or would add, of the checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
