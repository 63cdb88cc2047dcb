"""A run without a launcher, as docs/training/many-ranks.md starts it: its trainer by torchrun, the rest one by one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.runtime.ports import held_ports
from penstock.testing.train_process import RECIPE, ROOT, TrainProcess

PENSTOCK = Path(sys.executable).parent / "penstock"
_OTHERS = ("nats", "reward", "router", "rollout", "worker")
_END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a torchrun starts its ranks; the first one has all other processes too."""

    address: str
    """Under which the others reach it."""
    enter: Sequence[str] = ()
    """Words before a command that has to run on it."""


@dataclass(frozen=True, slots=True)
class TorchrunRun:
    """One such run."""

    train: TrainProcess
    """Its files and all its processes; its own process is the first torchrun."""
    torchruns: "list[subprocess.Popen[bytes]]"
    others: "Mapping[str, subprocess.Popen[bytes]]"
    """By service."""

    def pid_of_rank(self, rank: int) -> int:
        """Process id of the living rank of this number."""
        [pid] = [
            child.pid
            for torchrun in self.torchruns
            for child in psutil.Process(torchrun.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and child.environ().get("RANK") == str(rank)
        ]
        return pid

    def end(self) -> list[int | None]:
        """Wait for the end of every torchrun, stop the other processes, and return all exit codes."""
        for torchrun in self.torchruns:
            torchrun.wait(_END_S)
        for name in reversed(_OTHERS):
            self.others[name].terminate()
            self.others[name].wait(_END_S)
        return [process.returncode for process in (*self.torchruns, *self.others.values())]


@contextmanager
def torchrun_run(
    tmp_path: Path, *settings: str, hosts: Sequence[Host], ranks_per_host: int, max_restarts: int
) -> Iterator[TorchrunRun]:
    """Start every process; at the end none is left.

    Args:
        tmp_path: Gets the folder `runs`, and what the processes print.
        settings: Overrides of the recipe, for all of them.
        hosts: With a torchrun each.
        ranks_per_host: Ranks that each torchrun starts.
        max_restarts: How often each starts them again.
    """
    mark = f"penstock-test-{uuid.uuid4().hex}"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    output = tmp_path / "output.txt"
    with contextlib.ExitStack() as stack:
        nats, router, reward, torch = stack.enter_context(held_ports(4))
        # Killed processes leave files.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True))
        environment = {**os.environ, "PENSTOCK_TEST_MARK": mark, "PYTHONPATH": paths, "TMPDIR": scratch}
        sink = stack.enter_context(output.open("wb"))
        first = hosts[0].address
        addresses = {
            "network.host": first,
            "bus.url": f"nats://{first}:{nats}",
            "router.port": router,
            "reward.port": reward,
            "worker.router_address": f"{first}:{router}",
            "worker.reward_address": f"{first}:{reward}",
            "run.dir": tmp_path / "runs",
        }
        arguments = ["--config", RECIPE, *(f"--{key}={value}" for key, value in addresses.items()), *settings]

        def start(host: Host, *command: str | Path) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                [*host.enter, *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        others = {name: start(hosts[0], PENSTOCK, "serve", name, *arguments) for name in _OTHERS}
        torchruns = [
            start(
                host,
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={number}"),
                *(f"--master-addr={first}", f"--master-port={torch}", f"--nproc-per-node={ranks_per_host}"),
                *(f"--max-restarts={max_restarts}", "--no-python", PENSTOCK, "serve", "trainer", *arguments),
            )
            for number, host in enumerate(hosts)
        ]
        train = TrainProcess(torchruns[0], tmp_path / "runs", mark, output)
        try:
            yield TorchrunRun(train, torchruns, others)
        finally:
            for pid in train.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in (*torchruns, *others.values()):
                process.wait(_END_S)
