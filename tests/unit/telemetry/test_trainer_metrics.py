"""What the trainer shows Prometheus of its steps."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.prometheus import TrainerMetrics

_ROW = {
    **dict.fromkeys(
        ("wait_s", "data_wait_s", "demonstration_wait_s", "push_wait_s", "checkpoint_wait_s", "evaluation_wait_s"), 0.0
    ),
    "train_s": 1.5,
    "step_s": 2.0,
    "push_s": 0.1,
    "push_failed_replicas": 1,
    "num_samples": 8,
    "num_unjudged_samples": 2,
    "num_tokens_lag_0": 30.0,
    "num_tokens_lag_11": 12.0,
    "reward_mean": 0.25,
}


@pytest.fixture
def ledger() -> GroupLedger[Any, Any]:
    """Two groups fill the gate."""
    return GroupLedger(Gate(max_staleness=0, groups_per_step=2))


@pytest.fixture
def measured(ledger: GroupLedger[Any, Any], tmp_path: Path) -> TrainerMetrics:
    feeder: Any = SimpleNamespace(admitted_at=0.0)
    return TrainerMetrics(progress=Progress(run_id="r", num_steps=5), ledger=ledger, feeder=feeder, folder=tmp_path)


async def read(measured: TrainerMetrics) -> dict[str, Metric]:
    return {f"{each.name}_total" if each.type == "counter" else each.name: each for each in await measured.read()}


def value(metric: Metric, **labels: str) -> float:
    [found] = [sample.value for sample in metric.samples if sample.labels == labels]
    return float(found)


async def test_a_run_before_its_first_step_shows_no_numbers_of_steps(measured: TrainerMetrics) -> None:
    """A reward of 0 that nobody measured would be an alarm."""
    found = await read(measured)
    assert not [name for name in found if name.startswith("penstock_step_")]
    assert "penstock_trainer_usual_step_seconds" not in found
    assert value(found["penstock_trainer_phase"], phase="starting") == 1
    assert value(found["penstock_trainer_disk_free_bytes"]) > 0


async def test_the_newest_step_is_shown_and_forgotten_numbers_are_not(measured: TrainerMetrics) -> None:
    """A number that a step does not have, such as the difference of current tokens, is not that of an earlier one."""
    measured.observe({**_ROW, "dlogp_mean_current": 1e-6})
    measured.observe({**_ROW, "step_s": 4.0})
    found = await read(measured)
    assert value(found["penstock_step_reward_mean"]) == 0.25
    assert "penstock_step_dlogp_mean_current" not in found
    assert value(found["penstock_trainer_usual_step_seconds"]) == 3.0
    assert value(found["penstock_trainer_seconds_since_step"]) < 60


async def test_seconds_of_an_evaluation_that_holds_up_steps_are_no_silence(measured: TrainerMetrics) -> None:
    """After it, the step that it held up has its usual time."""
    measured._stepped_at = time.monotonic() - 600
    assert value((await read(measured))["penstock_trainer_seconds_since_step"]) > 500
    measured._progress.evaluated_at = time.monotonic() - 5
    found = await read(measured)
    assert value(found["penstock_trainer_seconds_since_step"]) < 60
    assert value(found["penstock_trainer_seconds_since_admission"]) < 60


async def test_groups_are_counted_by_outcome(measured: TrainerMetrics, ledger: GroupLedger[Any, Any]) -> None:
    """And the gate shows that it is full."""
    ledger.admit(0)
    ledger.admit(0)
    ledger.fail(0, 0)
    found = await read(measured)
    assert value(found["penstock_trainer_groups_total"], outcome="failed") == 1
    assert value(found["penstock_trainer_groups_untrained"]) == 1
    assert value(found["penstock_trainer_gate_groups"]) == 2
    assert value(found["penstock_trainer_groups_admitted_total"]) == 2


async def test_tokens_are_counted_by_a_bounded_lag(measured: TrainerMetrics) -> None:
    """Eleven versions are "8 and more", whatever max_staleness is."""
    from penstock.telemetry import metrics

    before = (await metrics.page()).decode()
    measured.observe(_ROW)
    after = (await metrics.page()).decode()
    assert "lag=" not in before or 'lag="11"' not in before
    assert 'penstock_trainer_tokens_total{lag="8"}' in after
    assert 'lag="11"' not in after
