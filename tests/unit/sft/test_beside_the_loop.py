"""What supervised training does beside its event loop."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.launch.settings.service_settings import for_sft
from services.recipe import Recipe
from services.trainer.sft.loop import Observer
from services.trainer.sft.main import train
from services.trainer.telemetry.metrics_log import MetricsLog

pytestmark = pytest.mark.leaves_behind("matplotlib keeps the fonts that a thread has used open", "descriptor")


async def test_metrics_are_written_and_drawn_beside_the_event_loop(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may hang. To read a hundred thousand steps takes half a minute, of which only what is drawn is kept."""
    kept, rows, write = list[dict[str, Any]](), MetricsLog.rows, MetricsLog.write

    def read(log: MetricsLog, *keep: Callable[[str], bool]) -> list[dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread()
        found = rows(log, *keep)
        kept.extend(found)
        return found

    def write_beside(log: MetricsLog, row: dict[str, Any]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        write(log, row)

    monkeypatch.setattr(MetricsLog, "rows", read)
    monkeypatch.setattr(MetricsLog, "write", write_beside)
    recipe = {
        "model": {"path": tiny_model_path},
        "data": {"answer_format": r"\boxed{{answer}}"},
        "sft": {"batch_size": 2},
        "trainer": {"num_steps": 1, "device": "cpu", "micro_batch_tokens": 100},
    }
    await train(for_sft(Recipe.model_validate(recipe)), tmp_path, asyncio.Event(), Observer())
    assert [row.keys() for row in kept] == [{"step", "loss"}]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
