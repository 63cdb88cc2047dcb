"""A Ray cluster under test, whose nodes have addresses and pretended GPUs of their own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.testing.train_process import ROOT

_PROGRAM = Path(__file__).with_name("ray_nodes.py")


class Nodes:
    """The nodes of the cluster, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Read where the head is."""
        self._process = process
        self._num_nodes = 1
        head = self._read()
        self.address: str = head["address"]
        self.dashboard: str = head["dashboard"]
        self.head: str = head["node"]

    def add(
        self,
        *,
        num_gpus: int,
        num_cpus: int = 4,
        environment: dict[str, str] | None = None,
        hidden: Path | None = None,
    ) -> str:
        """Add a node and return its id; `environment` is that of its processes. They do not see what is in the folder
        `hidden`, and neither do those of nodes that are added later; it needs root."""
        self._num_nodes += 1
        options: dict[str, Any] = {
            "num_gpus": num_gpus,
            "num_cpus": num_cpus,
            "env_vars": environment,
            "node_ip_address": f"127.0.0.{self._num_nodes}",
            # Each host unpacks a job's folder for itself, removing what is there. In one folder for all nodes of this
            # machine, the first task on a node would remove the folder in which the job runs on the head.
            "runtime_env_dir_name": f"runtime_resources_{self._num_nodes}",
        }
        return str(self._ask({"add": options, "hidden": None if hidden is None else str(hidden)})["node"])

    def kill(self, node_id: str) -> None:
        """Kill a node's raylet, as if its host died, and wait until Ray has noticed."""
        self._ask({"kill": node_id})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(command)}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster's process ended with {self._process.wait()}"
        return dict(json.loads(line))


@contextmanager
def cluster(**head: Any) -> Iterator[Nodes]:
    """Yield a cluster that has a head node, without GPUs unless `head` says otherwise."""
    options = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, **head}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    scratch = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets have little room
    process = subprocess.Popen(
        [sys.executable, _PROGRAM, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        yield Nodes(process)
    finally:
        process.communicate(timeout=120)
        shutil.rmtree(scratch, ignore_errors=True)
