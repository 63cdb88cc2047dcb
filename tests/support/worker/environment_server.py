"""`penstock serve environments` as a process of its own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.waiting import HANG_S


@dataclass(frozen=True)
class EnvironmentServer:
    """A server that is ready."""

    process: subprocess.Popen[str]
    url: str
    """http://host:port."""


@contextlib.contextmanager
def environment_server(*settings: str) -> Iterator[EnvironmentServer]:
    """`penstock serve environments` with `settings` such as --environment_server.port=7010, until the context ends."""
    command = [sys.executable, "-m", "services.cli", "serve", "environments", "--log.format=json", *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = list[str]()
            for line in process.stderr:
                lines.append(line)
                record = json.loads(line) if line.startswith("{") else {}
                if record.get("event") == "environments.served":
                    yield EnvironmentServer(process=process, url=record["address"])
                    break
            else:
                raise AssertionError("the server did not start:\n" + "".join(lines))
        finally:
            process.terminate()
            process.communicate(timeout=HANG_S)
