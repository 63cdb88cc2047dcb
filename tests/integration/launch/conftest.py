"""A run of small programs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch.fake_run import FakeRun


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[Callable[..., FakeRun]]:
    """Start a run; what a failing test leaves of it is killed."""
    runs: list[FakeRun] = []

    def start(specs: list[dict[str, Any]], **config: Any) -> FakeRun:
        runs.append(FakeRun(tmp_path, specs, **config))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        for stream in (run.process.stdout, run.process.stderr):
            if stream is not None:
                stream.close()
