"""Alerts reach people: a real Prometheus, a real Alertmanager and a webhook; `make test-observability`.

Needs Debian's packages prometheus and prometheus-alertmanager.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import NetworkConfig, RunConfig
from penstock.http.metrics import serving
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.prometheus import TrainerMetrics
from tests.observability.alertmanager import notifying
from tests.observability.prometheus import scraping
from tests.support.waiting import HANG_S

TOKEN = "0b7e5f6c9d2a48138f1d2e3c4b5a6978"


def row(num_steps_without_gradient: int) -> dict[str, Any]:
    """What a trainer counts of a step."""
    parts = ("train", "wait", "data_wait", "demonstration_wait", "push_wait", "checkpoint_wait", "evaluation_wait")
    counts = ("push_s", "push_failed_replicas", "num_samples", "num_unjudged_samples")
    return {
        **dict.fromkeys((*(f"{part}_s" for part in parts), *counts), 0.0),
        "step_s": 2.0,
        "num_steps_without_gradient": num_steps_without_gradient,
    }


async def test_people_are_told_of_an_alert_and_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules and configurations of the compose stack: which run, what is wrong, and what to do."""
    monkeypatch.setattr(metrics, "_process", metrics._Process())
    metrics.name_process(service="trainer", name="trainer", run="mine")
    (tmp_path / "mine-1").mkdir()
    feeder: Any = SimpleNamespace(admitted_at=time.monotonic())
    trainer = TrainerMetrics(
        progress=Progress(run_id="r", num_steps=5),
        ledger=GroupLedger(Gate(max_staleness=0, groups_per_step=2)),
        feeder=feeder,
        folder=tmp_path,
    )
    trainer.observe(row(12))
    with notifying() as alertmanager, metrics.exposed(trainer.read):
        async with serving(0, RunConfig(folder=tmp_path / "mine-1"), NetworkConfig(), Security(token=TOKEN)):
            with scraping(tmp_path, TOKEN, alertmanager=alertmanager.address):
                await alertmanager.until_told({"PenstockNoGradient"}, "firing", timeout_s=HANG_S)
                trainer.observe(row(0))
                await alertmanager.until_told({"PenstockNoGradient"}, "resolved", timeout_s=HANG_S)
    assert {alert for status in ("firing", "resolved") for alert in alertmanager.told(status)} == {"PenstockNoGradient"}
    first = alertmanager.messages[0]
    assert (first["receiver"], first["status"]) == ("people", "firing")
    assert first["groupLabels"] == {"alertname": "PenstockNoGradient", "run": "mine-1"}
    [alert] = first["alerts"]
    assert alert["labels"] == {
        "alertname": "PenstockNoGradient",
        "job": "penstock",
        "run": "mine-1",
        "service": "trainer",
        "instance": "trainer",
        "severity": "warning",
    }
    assert alert["annotations"] == {
        "summary": "12 steps of run mine-1 in a row had no policy gradient.",
        "remedy": "See which samples have an advantage, and what rejects their tokens.",
    }
