"""What worker processes inherit from the service that starts them harms no item."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_VERIFIERS = """
import resource, sys

def prints(golds, response, prompt):
    sys.stdout.write("judging\\n" * 10_000)
    if sys.stderr is not None:
        sys.stderr.write("judging\\n" * 10_000)
    return 1.0

def lowers(golds, response, prompt):
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    return 1.0
"""
_PROGRAM = """
import asyncio, ctypes, sys
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import VerifierTask

ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)  # not even root can raise a limit in what is started from here on

async def main():
    verifiers = {name: f"verifiers.py:{name}" for name in sys.argv[1:]}
    pool = WorkerPool(num_workers=1, memory_limit_bytes=2**28, recycle_after=100, verifiers=verifiers)
    await pool.start()
    for name in sys.argv[1:]:
        reply, _ = await pool.run(VerifierTask(verifier=name, golds=("1",), response="", prompt=""), 60.0)
        print(name, reply.status.name, reply.credit)
    await pool.close()

asyncio.run(main())
"""


def verdicts(folder: Path, *names: str, before: str = "true", redirection: str = "") -> list[str]:
    """What becomes of an item for each of the verifiers `names`, in a pool that a shell starts after `before`."""
    (folder / "verifiers.py").write_text(_VERIFIERS)
    (folder / "program.py").write_text(_PROGRAM)
    done = subprocess.run(
        ["bash", "-c", f"{before}; exec {sys.executable} program.py {' '.join(names)} {redirection}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("redirection", ["2> log", "2>&-"])
def test_a_verifier_may_print(tmp_path: Path, redirection: str) -> None:
    """Also where standard error is a file, which workers may not write, as in `penstock train`; or closed."""
    assert verdicts(tmp_path, "prints", redirection=redirection) == ["prints OK 1.0"]


@pytest.mark.parametrize("before", ["ulimit -t 3600", "true"])
def test_a_limit_of_processor_time_is_no_failure(tmp_path: Path, before: str) -> None:
    """Whether a shell has set it or a verifier; what a verifier lowers is not the next one's, and no worker dies."""
    assert verdicts(tmp_path, "lowers", "lowers", "prints", before=before) == [
        *("lowers OK 1.0", "lowers OK 1.0", "prints OK 1.0")
    ]
