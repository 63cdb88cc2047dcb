"""Linux namespaces that stand for hosts: each has a name and a network of its own, and all share files. Needs root.

127.0.0.1 of one is not that of another. They reach each other by name, over a bridge on the first of them.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.testing.train_process import ROOT
from tests.support.waiting import HANG_S, wait_until

PROGRAMS = ("unshare", "nsenter", "ip")
_NETWORK = "10.231.0"


def search_path() -> str:
    """PATH with the folders of programs that only root uses."""
    return f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ['PATH']}"


def missing(programs: Sequence[str] = PROGRAMS, *, packages: str = "iproute2 util-linux") -> str:
    """Why there can be no hosts with these programs, which some packages of Debian have; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root: run this as root, for example in a privileged container"
    absent = [program for program in programs if shutil.which(program, path=search_path()) is None]
    return f"{', '.join(absent)}: not installed; apt-get install {packages}" if absent else ""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts of one network."""

    addresses: Mapping[str, str]
    """Of each, by its name."""
    processes: "Mapping[str, subprocess.Popen[bytes]]"
    """A process in the namespaces of each."""

    def enter(self, name: str) -> list[str]:
        """The words before a command that run it on a host."""
        namespaces = [f"--target={self.processes[name].pid}", "--net", "--uts", "--mount"]
        return ["nsenter", *namespaces, f"--wd={ROOT}", "--"]

    def run(self, name: str, *command: str) -> None:
        """Run a command on a host; it must succeed."""
        subprocess.run([*self.enter(name), *command], env={**os.environ, "PATH": search_path()}, check=True)


@contextmanager
def network_of_hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    """Make hosts of these names, whose files are in `folder`."""
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
    with contextlib.ExitStack() as stack:
        hosts = Hosts(addresses, {name: stack.enter_context(_host(folder, name)) for name in names})
        _connect(hosts)
        yield hosts


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
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", " && ".join(lines)]
    process = subprocess.Popen(command, env={**os.environ, "PATH": search_path()})
    try:
        wait_until(ready.exists, HANG_S)
        assert ready.exists(), f"no namespaces for {name}"
        yield process
    finally:
        process.kill()
        process.wait()


def _connect(hosts: Hosts) -> None:
    """A bridge on the first host, to which each other one has a cable."""
    first, *others = hosts.addresses
    hosts.run(first, "ip", "link", "add", "br0", "type", "bridge")
    hosts.run(first, "ip", "address", "add", f"{hosts.addresses[first]}/24", "dev", "br0")
    hosts.run(first, "ip", "link", "set", "br0", "up")
    for name in others:
        pid = str(hosts.processes[name].pid)
        hosts.run(first, *("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", pid))
        hosts.run(first, "ip", "link", "set", f"to-{name}", "master", "br0", "up")
        hosts.run(name, "ip", "address", "add", f"{hosts.addresses[name]}/24", "dev", "eth0")
        hosts.run(name, "ip", "link", "set", "eth0", "up")
