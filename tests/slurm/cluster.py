"""A real Slurm on this machine: a controller and nodes. Needs root.

Linux namespaces stand for hosts, because Debian's slurmd takes one node for one host.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import hosts
from tests.support.launch.hosts import Hosts, network_of_hosts, search_path
from tests.support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
PROGRAMS = (*hosts.PROGRAMS, "munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONTROLLER, NODES = "ctl", ("node1", "node2")
CPUS = 2

_CONF = """\
ClusterName=penstock
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 MaxTime=INFINITE PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes={nodes} PriorityTier=2 MaxTime=INFINITE PreemptMode=OFF
"""
_CGROUP = "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def missing() -> str:
    """Why there can be no such cluster here; empty if there can."""
    return hosts.missing(PROGRAMS, packages="slurmctld slurmd slurm-client munge iproute2")


@dataclass(slots=True)
class Cluster:
    """A running cluster."""

    folder: Path
    hosts: Hosts

    def on(self, host: str, *command: str | Path) -> list[str]:
        """The command that runs `command` on a host."""
        return [*self.hosts.enter(host), *map(str, command)]

    def environment(self) -> dict[str, str]:
        """Of people and daemons; jobs inherit it."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": search_path(), "PYTHONPATH": paths}
        return {**os.environ, **own, "TMPDIR": "/tmp"}

    def run(self, *command: str | Path, host: str = CONTROLLER) -> str:
        """Run a command on a host and return what it prints; it must succeed."""
        done = subprocess.run(
            self.on(host, *command), env=self.environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def penstock(self, *arguments: str | Path) -> str:
        """Run `penstock` on the controller's host, as a person on a login node."""
        return self.run(sys.executable, "-P", "-m", "services.cli", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, holds: Callable[[dict[str, str]], bool], what: str, timeout_s: float) -> None:
        """Wait until what Slurm says of a job holds."""
        ends_at = time.monotonic() + timeout_s
        while not holds(self.job(number)):
            assert time.monotonic() < ends_at, f"waited for {what}: {self.job(number)}\n{self.logs()}"
            time.sleep(1)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.folder.glob("slurm*.log"))
        )


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Run a cluster whose files are in `folder`; no job and no process is left."""
    folder.mkdir()
    (folder / "state").mkdir()
    conf = _CONF.format(controller=CONTROLLER, folder=folder, nodes=",".join(NODES), cpus=CPUS)
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text(_CGROUP)
    with contextlib.ExitStack() as stack:
        cluster = Cluster(folder, stack.enter_context(network_of_hosts(folder, CONTROLLER, *NODES)))
        stack.callback(_remove_cgroups)
        stack.enter_context(_munged(folder))
        stack.enter_context(_daemon(cluster, CONTROLLER, "slurmctld", "-D"))
        for node in NODES:
            stack.enter_context(_daemon(cluster, node, "slurmd", "-D"))
        stack.callback(_end_jobs, cluster)
        ends_at = time.monotonic() + HANG_S
        while (states := _states(cluster)) != ["idle"] * len(NODES):
            assert time.monotonic() < ends_at, f"{states}\n{cluster.logs()}"
            time.sleep(0.5)
        yield cluster


def _states(cluster: Cluster) -> list[str]:
    done = subprocess.run(
        cluster.on(CONTROLLER, "sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"),
        env=cluster.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


@contextmanager
def _munged(folder: Path) -> Iterator[None]:
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key, "socket": socket, "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
    command = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
    with _ended(subprocess.Popen(command, env={**os.environ, "PATH": search_path()}, stderr=subprocess.DEVNULL)):
        wait_until(socket.exists, HANG_S)
        assert socket.exists(), (folder / "munged.log").read_text()
        yield


@contextmanager
def _daemon(cluster: Cluster, host: str, *command: str) -> Iterator[None]:
    with (cluster.folder / f"{command[0]}-{host}.out").open("wb") as sink:
        process = subprocess.Popen(
            cluster.on(host, *command), env=cluster.environment(), stdout=sink, stderr=subprocess.STDOUT
        )
    with _ended(process):
        yield


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _remove_cgroups() -> None:
    """Remove what slurmd leaves where each kind of cgroup has a tree of its own (version 1)."""
    for node in NODES:
        for tree in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder in sorted((path for path in tree.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            tree.rmdir()


def _end_jobs(cluster: Cluster) -> None:
    """Cancel what still runs, and wait for its end: a slurmd leaves its jobs running."""
    cluster.run("scancel", "--user=root")
    ends_at = time.monotonic() + 30.0
    while cluster.run("squeue", "--noheader") and time.monotonic() < ends_at:
        cluster.run("scancel", "--signal=KILL", "--full", "--user=root")
        time.sleep(1)
