"""`penstock train` with the real services, but for the engines: mistakes, Ctrl-C, and a launcher that is killed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest

from tests.support.waiting import HANG_S, wait_until

PENSTOCK = Path(sys.executable).parent / "penstock"
SERVICES = ("nats", "reward", "router", "trainer", "worker-0")


class TrainCommand:
    """A `penstock train` without engines: its trainer waits for them for ever."""

    def __init__(
        self,
        model: Path,
        runs: Path,
        *arguments: str,
        stdout: int = subprocess.PIPE,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        recipe = runs / "recipe.toml"
        recipe.write_text(f'[run]\nname = "t"\ndir = "{runs}"\n[model]\npath = "{model}"\n[rollout]\nreplicas = 0\n')
        self.runs = runs
        self.seen: set[psutil.Process] = set()
        self.process = subprocess.Popen(
            [PENSTOCK, "train", recipe, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def wait_until_up(self) -> None:
        """Wait until every service has said so."""
        assert self.process.stdout is not None
        waiting = set(SERVICES)
        while waiting:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            waiting -= {line.split()[0]} if "is up" in line else set()
        self.seen.update(psutil.Process(self.process.pid).children(recursive=True))

    def finish(self, timeout_s: float) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def survivors(self) -> list[str]:
        """Processes of the run that are alive still; zombies are not."""
        wait_until(lambda: not self._alive(), timeout_s=10.0)  # less than orphans take to notice
        return self._alive()

    def _alive(self) -> list[str]:
        alive = []
        for process in self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(" ".join(process.cmdline()))
        return alive


@pytest.fixture
def train(tiny_model_path: Path, tmp_path: Path) -> Iterator[Callable[..., TrainCommand]]:
    """Start `penstock train`; what a failing test leaves of it is killed."""
    commands: list[TrainCommand] = []

    def start(*arguments: str, **more: Any) -> TrainCommand:
        commands.append(TrainCommand(tiny_model_path, tmp_path, *arguments, **more))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.communicate()


def test_port_in_use(train: Callable[..., TrainCommand], tmp_path: Path) -> None:
    """A port that is taken ends the run before it starts, with its setting's name, exit code 2 and no run folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = train(f"--reward.port={port}").finish(timeout_s=180.0)
    assert code == 2
    assert err.startswith(f"error: reward.port: cannot listen on 127.0.0.1:{port}: ")
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.name in ("config.toml", "logs")] == []


def test_the_run_is_shown_until_it_ends(train: Callable[..., TrainCommand], tmp_path: Path) -> None:
    """`--view` on a terminal with a display: its address is printed, and a browser opened with one of its own."""
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    terminal, inside = os.openpty()
    environment = {"DISPLAY": ":0", "BROWSER": f"{browser} %s &", "PENSTOCK_TOKEN": ""}
    command = train("--view", stdout=inside, environment=environment)
    os.close(inside)
    with _reading(terminal) as shown:
        wait_until(lambda: opened.exists() or command.process.poll() is not None, timeout_s=180.0)
        wait_until(lambda: b"\n" in shown)
        [printed] = re.findall(r"view +(http://127\.0\.0\.1:\d+/\?token=\S+)", shown.decode())
        assert opened.read_text().strip() != printed  # other users of the machine see a program's arguments
        for address in (printed, opened.read_text().strip()):
            with httpx.Client(follow_redirects=True, timeout=HANG_S) as client:
                assert "<title>Penstock</title>" in client.get(address).text
                [run] = client.get(httpx.URL(address).join("/api/runs")).json()
            assert run["folder"] == str(next(tmp_path.glob("t-*")))
            assert run["is_running"]
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(180.0) == 130
    with pytest.raises(httpx.ConnectError):
        httpx.get(printed, timeout=HANG_S)


@contextlib.contextmanager
def _reading(terminal: int) -> Iterator[bytearray]:
    """Read what a process writes to a terminal, which has room for little, until the process has ended."""
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has it open any longer
            while data := os.read(terminal, 65536):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield shown
    finally:
        reader.join(HANG_S)
        os.close(terminal)


@pytest.mark.slow
def test_nats_out_of_reach(train: Callable[..., TrainCommand], tmp_path: Path) -> None:
    """A bus.url where nobody answers ends the run before it starts, with one line, exit code 2 and no run folder."""
    code, _, err = train("--bus.url=nats://127.0.0.1:1").finish(timeout_s=180.0)
    assert code == 2
    assert err.startswith("error: bus.url = 'nats://127.0.0.1:1'")
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.name in ("config.toml", "logs")] == []


@pytest.mark.slow
@pytest.mark.variant  # tests/e2e/test_killed_processes.py
def test_interrupt_and_resume(train: Callable[..., TrainCommand]) -> None:
    """Ctrl-C ends everything and says how to go on; going on uses the same folder."""
    command = train()
    command.wait_until_up()
    command.process.send_signal(signal.SIGINT)
    code, out, err = command.finish(timeout_s=180.0)
    assert "did not stop within" not in out
    assert (code, err) == (130, "")
    assert command.survivors() == []
    (folder,) = command.runs.glob("t-*")
    assert "signal.received" not in out  # it belongs to the launcher's log, not into the table
    assert "signal.received" in (folder / "logs/launcher.log").read_text()
    assert f"penstock train --resume {folder}" in out
    again = subprocess.Popen(
        [PENSTOCK, "train", "--resume", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert again.stdout is not None
    while "nats is up" not in again.stdout.readline():
        assert again.poll() is None
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=200)
    assert [path.name for path in command.runs.glob("t-*")] == [folder.name]


@pytest.mark.slow
def test_an_interrupt_without_a_reader(train: Callable[..., TrainCommand]) -> None:
    """As `penstock train | tee log`, where Ctrl-C ends `tee` too."""
    command = train()
    command.wait_until_up()
    assert command.process.stdout is not None
    command.process.stdout.close()
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(180.0) == 130
    assert command.process.stderr is not None
    assert command.process.stderr.read() == ""
    assert command.survivors() == []


@pytest.mark.slow
def test_killed_launcher_leaves_no_service(train: Callable[..., TrainCommand]) -> None:
    """kill -9 of `penstock train` ends nats-server, the services and their worker processes."""
    command = train()
    command.wait_until_up()
    assert len(command.seen) > len(SERVICES)
    command.process.kill()
    command.process.wait()
    assert command.survivors() == []
