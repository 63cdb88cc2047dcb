"""Whether an engine leaves the cores to others."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from services.rollout.testing.engine_process import EngineProcess
from tests.support.waiting import until

_NUM_LOOKS = 20


async def until_at_rest(engine: EngineProcess) -> None:
    """Wait until none of its threads wants a core, many times one after the other."""
    num_looks_at_rest = 0

    def is_at_rest() -> bool:
        nonlocal num_looks_at_rest
        num_looks_at_rest = 0 if _wants_a_core(engine.process.pid) else num_looks_at_rest + 1
        return num_looks_at_rest == _NUM_LOOKS

    await until(is_at_rest)


def _wants_a_core(pid: int) -> bool:
    """Whether any thread of a process and its descendants runs, or would if a core were free."""
    engine = psutil.Process(pid)
    return any("R" in _states(process.pid) for process in (engine, *engine.children(recursive=True)))


def _states(pid: int) -> Iterator[str]:
    """Of each thread of a process; of what has ended meanwhile, none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield (thread / "stat").read_text().rpartition(")")[2].split()[0]
