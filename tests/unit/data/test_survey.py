"""Surveys of sources: what was measured stays measured."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.data import survey as module
from services.trainer.data.survey import survey


def test_an_interrupted_survey_keeps_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring pictures takes long; the next start goes on from there."""
    saved: list[int] = []
    num_read = 0

    def on_row() -> None:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_measure", lambda *_: 7)
    monkeypatch.setattr(module, "_count", lambda *_: None)
    rows: Any = [None] * 5
    lengths: Any = SimpleNamespace(save=lambda: saved.append(num_read))
    with pytest.raises(KeyboardInterrupt):
        survey(rows, rows, lengths, None, on_row=on_row)
    assert saved == [3]
