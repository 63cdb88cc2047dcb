"""The reward service as a process of its own, for tests whose clients block."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RewardProcess:
    """Where it listens."""

    address: str
    """host:port of gRPC."""
    url: str
    """http://host:port."""
    pid: int
    """The server's process id."""


@contextlib.contextmanager
def reward_process(*settings: str) -> Iterator[RewardProcess]:
    """`penstock serve reward` with `settings` such as --reward.workers=1, until the context ends."""
    command = [sys.executable, "-m", "services.cli", "serve", "reward", "--log.format=json", *settings]
    # Without preexec_fn: what runs between fork and exec cannot rely on anything where other threads call into gRPC.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            addresses, lines = list[str](), list[str]()
            for line in process.stderr:
                lines.append(line)
                record = json.loads(line) if line.startswith("{") else {}
                if record.get("event") == "server.started":
                    addresses.append(record["address"])
                if len(addresses) == 2:
                    break
            assert len(addresses) == 2, "the service did not start:\n" + "".join(lines)
            yield RewardProcess(address=addresses[0], url=addresses[1], pid=process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=60)
