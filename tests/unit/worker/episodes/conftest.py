"""The clock of episodes, moved by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.worker.episodes import clock as clock_module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`at` is what episodes take for now, in seconds since 1970 too."""
    made = SimpleNamespace(at=0.0, monotonic=lambda: made.at, time=lambda: made.at)
    monkeypatch.setattr(clock_module, "time", made)
    return made
