"""A reward service as its users start it: `penstock serve reward`, in its own process, with its children."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc


class ServiceProcess:
    """A service started and stopped by the context; `settings` are overrides of [reward]."""

    def __init__(self, **settings: object) -> None:
        self._settings = {"workers": 2, **settings}
        self.address = ""
        """host:port of gRPC."""
        self.http_address = ""
        """host:port of HTTP."""

    def __enter__(self) -> Self:
        overrides = [f"--reward.{key}={value}" for key, value in self._settings.items()]
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", "reward", "--log.format=json", *overrides],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "server.started" and event["address"].startswith("http://"):
                self.http_address = event["address"].removeprefix("http://")
            elif event.get("event") == "server.started":
                self.address = event["address"]
            if self.address and self.http_address:
                break
        else:
            raise RuntimeError("the reward service did not start")
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30).status != 1:
                time.sleep(0.005)
        self.start_s = time.perf_counter() - started
        threading.Thread(target=self._process.stderr.read, daemon=True).start()  # otherwise its log would fill the pipe
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)

    def memory_bytes(self) -> int:
        """Return the memory of the whole tree; pages that several processes share count once."""
        return sum(size for process in self._tree() if (size := _pss_bytes(process)) is not None)

    def server_memory_bytes(self) -> int:
        """Return the memory of the server process alone."""
        return _pss_bytes(psutil.Process(self._process.pid)) or 0

    def server_own_memory_bytes(self) -> int:
        """Return the memory that the server process allocated; the rest belongs to files, which processes may share."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))

    def num_fds(self) -> int:
        """Return the number of open files of the server process."""
        return int(psutil.Process(self._process.pid).num_fds())

    def num_processes(self) -> int:
        """Return the number of processes of the tree, including dead ones that were not reaped."""
        return len(self._tree())

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


def _pss_bytes(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return None  # a worker that has just been replaced
