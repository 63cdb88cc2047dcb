"""Processor time of a running demo, by the purpose of its processes and threads.

Invariant: time is the kernel's own count, user and system, so it does not depend on the machine's other work, apart
from the cost of colder caches. Threads that have ended are in their process's `other threads`.
"""

import collections
from pathlib import Path
from typing import Final

import psutil

_KIND_OF_SERVICE = {"rollout": "engine: gRPC server and tokenizer manager"}
SCHEDULERS: Final = "engine: SGLang's scheduler and detokenizer"
_KIND_OF_CHILDREN = {"rollout": SCHEDULERS}
_MAIN, _OTHER = "{} (event loop)", "{} (other threads)"
_THREADED = ("trainer",)
"""Services whose event loop's thread is counted separately from the rest, which compute."""


def core_seconds(launcher: psutil.Process) -> collections.Counter[str]:
    """Return the seconds of processor time that each kind of process under `launcher` has used so far."""
    seconds: collections.Counter[str] = collections.Counter()
    seconds["launcher"] += _of_process(launcher)
    for child in launcher.children():
        try:
            service = _service(child.cmdline())
            if service in _THREADED:
                whole, main = _of_process(child), _of_main_thread(child)
                seconds[_MAIN.format(service)] += main
                seconds[_OTHER.format(service)] += whole - main
            else:
                seconds[_KIND_OF_SERVICE.get(service, service)] += _of_process(child)
            for descendant in child.children(recursive=True):
                seconds[_KIND_OF_CHILDREN.get(service, service)] += _of_process(descendant)
        except psutil.NoSuchProcess:
            continue
    return seconds


def _service(command: list[str]) -> str:
    """Return the argument of `penstock serve`; any other command is the launcher's."""
    if "serve" in command:
        return command[command.index("serve") + 1]
    return "nats-server" if command and Path(command[0]).name == "nats-server" else "launcher"


def _of_process(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _of_main_thread(process: psutil.Process) -> float:
    return next(each.user_time + each.system_time for each in process.threads() if each.id == process.pid)
