"""Forks engines from a process that has imported SGLang, which takes longer than the rest of an engine's start.

    python -W ignore -m services.rollout.testing.engine_forker

It reads a line of JSON for each engine from its standard input, and writes one line when it has forked it and one when
it has ended. Only for tests on CPUs: engines of a run share nothing, and what has used a GPU cannot be forked.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import sys
import tempfile
from typing import Any

from penstock.config import NetworkConfig
from penstock.runtime.children.parent_death import die_with
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings

_STDIN, _STDOUT, _STDERR = range(3)


def main() -> int:
    """Fork engines until standard input ends, or be one; return the exit code."""
    _import_all()
    if (request := _fork_all()) is None:
        return 0
    _become(request)
    runpy.run_module("services.cli", run_name="__main__")
    return 0


def _import_all() -> None:
    os.environ.update(settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=0.0, cuda=False))
    sys.modules["flashinfer"] = None  # type: ignore[assignment]  # as an engine on a CPU does
    gc.disable()
    for name in ("services.cli", "services.rollout.engine.server", "sglang.srt.entrypoints.engine"):
        importlib.import_module(name)
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a forked engine could hang on what another one holds"


def _fork_all() -> dict[str, Any] | None:
    """Fork an engine for each request; return its request in an engine, and None at the end."""
    requests = os.fdopen(_STDIN, "rb", buffering=0, closefd=False)  # `select` does not see what a buffer holds
    engines = dict[int, int]()
    """Process id by a descriptor that is readable once the process has ended."""
    try:
        while True:
            readable, _, _ = select.select([_STDIN, *engines], [], [])
            for ended in engines.keys() & {*readable}:
                _, status = os.waitpid(pid := engines.pop(ended), 0)
                os.close(ended)
                _say(ended=pid, code=os.waitstatus_to_exitcode(status))
            if _STDIN in readable:
                line = requests.readline()
                if not line:
                    return None
                forker = os.getpid()
                if (pid := os.fork()) == 0:
                    die_with(forker)
                    return dict(json.loads(line))
                engines[os.pidfd_open(pid)] = pid
                _say(forked=pid)
    finally:
        for descriptor in engines:
            os.close(descriptor)


def _say(**answer: int) -> None:
    os.write(_STDOUT, json.dumps(answer).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Be as if the interpreter had been started with these arguments, environment and log."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(request["log"], "wb") as log:
        os.dup2(nothing.fileno(), _STDIN)
        os.dup2(log.fileno(), _STDOUT)
        os.dup2(log.fileno(), _STDERR)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is found in the environment when it is needed
    sys.argv = ["penstock", *request["arguments"]]
    gc.enable()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
