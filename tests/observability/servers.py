"""Debian's Prometheus and Alertmanager as processes."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@contextmanager
def running(command: Sequence[str], *, url: str, log: Path) -> Iterator[None]:
    """Run a server that says at `url`/-/ready when it is ready, until the context ends; `log` gets its output."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(url, process, log)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())
