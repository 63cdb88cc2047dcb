"""A real Slurm on this machine: a controller and nodes, each with a host name and a network of its own.

Linux namespaces stand for hosts, because Debian's slurmd takes one node for one host: 127.0.0.1 of one is not that of
another, and they reach each other by name over a bridge. Files are shared. Needs root.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "nsenter", "ip")
CONTROLLER, NODES = "ctl", ("node1", "node2")
CPUS = 2

_NETWORK = "10.231.0"
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
    if os.geteuid() != 0:
        return "namespaces need root: run `make test-slurm` as root, for example in a privileged container"
    if absent := [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]:
        return f"{', '.join(absent)}: not installed; apt-get install slurmctld slurmd slurm-client munge iproute2"
    return ""


def _path() -> str:
    return f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ['PATH']}"


@dataclass(slots=True)
class Cluster:
    """A running cluster."""

    folder: Path
    hosts: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    """A process in the namespaces of each host."""

    def on(self, host: str, *command: str | Path) -> list[str]:
        """The command that runs `command` on a host."""
        enter = ["nsenter", f"--target={self.hosts[host].pid}", "--net", "--uts", "--mount"]
        return [*enter, f"--wd={ROOT}", "--", *map(str, command)]

    def environment(self) -> dict[str, str]:
        """Of people and daemons; jobs inherit it."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path(), "PYTHONPATH": paths}
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
    cluster = Cluster(folder)
    folder.mkdir()
    (folder / "state").mkdir()
    conf = _CONF.format(controller=CONTROLLER, folder=folder, nodes=",".join(NODES), cpus=CPUS)
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text(_CGROUP)
    names = [(CONTROLLER, 1), *((node, number) for number, node in enumerate(NODES, start=11))]
    addresses = "".join(f"{_NETWORK}.{number} {name}\n" for name, number in names)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    with contextlib.ExitStack() as stack:
        for name, _ in names:
            cluster.hosts[name] = stack.enter_context(_host(folder, name))
        _connect(cluster, names)
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
def _host(folder: Path, name: str) -> "Iterator[subprocess.Popen[bytes]]":
    ready = folder / f"{name}.ready"
    lines = (
        f"hostname {name}",
        f"mount --bind {folder}/hosts /etc/hosts",
        "ip link set lo up",
        f"touch {ready}",
        "exec sleep infinity",
    )
    process = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", " && ".join(lines)])
    try:
        wait_until(ready.exists, HANG_S)
        assert ready.exists(), f"no namespaces for {name}"
        yield process
    finally:
        process.kill()
        process.wait()


def _connect(cluster: Cluster, names: Sequence[tuple[str, int]]) -> None:
    """A bridge on the controller's host, to which each node has a cable."""
    cluster.run("ip", "link", "add", "br0", "type", "bridge")
    cluster.run("ip", "address", "add", f"{_NETWORK}.1/24", "dev", "br0")
    cluster.run("ip", "link", "set", "br0", "up")
    for name, number in names[1:]:
        pid = str(cluster.hosts[name].pid)
        cluster.run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", pid)
        cluster.run("ip", "link", "set", f"to-{name}", "master", "br0", "up")
        cluster.run("ip", "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0", host=name)
        cluster.run("ip", "link", "set", "eth0", "up", host=name)


@contextmanager
def _munged(folder: Path) -> Iterator[None]:
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key, "socket": socket, "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
    command = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
    with _ended(subprocess.Popen(command, env={**os.environ, "PATH": _path()}, stderr=subprocess.DEVNULL)):
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
