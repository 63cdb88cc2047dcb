"""docs/metrics.md explains every metric that a step logs."""

import re
from pathlib import Path

import msgspec
import pytest

from services.trainer.admission.group_state import GroupCounts
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.config import TrainerConfig
from services.trainer.flow.filter_tally import Interval
from services.trainer.telemetry.episode_metrics import describe_episodes
from services.trainer.telemetry.field_names import FIELD_NAMES
from services.trainer.telemetry.step_metrics import (
    StepClock,
    describe_batch,
    describe_filters,
    describe_groups,
    describe_push,
)
from services.trainer.weight_sync.push_report import PushReport
from tests.support.trainer.families import random_qwen3_moe, write_model
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.read_groups import reader_of

_UNGROUPED = {"reward", "solve_none", "solve_all", "frac_reward_zero_std"}
"""Names of other frameworks without a group."""

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def explained() -> list[re.Pattern[str]]:
    """The names of the page's tables; `<k>` stands for anything."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w<>/]+)`", row.split(" | ")[0])]
    return [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in names]


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"preset": "dppo", "kl": {"kind": "k3"}, "entropy": {"kind": "bonus"}, "drift": 0.1},
        {"preset": "slime_geo3k", "correction": {"kind": "mask", "veto_low": 1e-4}, "rejection": {"kind": "opsm"}},
    ],
)
def test_every_metric_is_explained(tiny_model_path: Path, algorithm: dict[str, object]) -> None:
    """Those of the backend under several algorithms, and those of the controller."""
    group = make_group(
        tiny_model_path, index=0, rewards=(1.0, 0.0, 0.0, 1.0), version=1, images=[picture(0)], placeholders=[9]
    )
    config = TrainerConfig.model_validate({"device": "cpu", "optimizer": {"learning_rates": {"tower": 1e-7}}})
    backend = InProcessBackend(
        tiny_model_path, config, AlgorithmConfig.model_validate(algorithm), seed=0, temperature=1.0
    )
    backend.load(None)
    ready = reader_of(tiny_model_path).read(group, IMAGES)
    row = take_step(backend, [[ready]], 2)
    row |= describe_batch([group])
    samples = tuple(msgspec.structs.replace(sample, metrics={"first_attempt": 1.0}) for sample in group.samples)
    row |= describe_episodes([msgspec.structs.replace(group, environment="geo3k_tools", samples=samples)])
    row |= describe_filters([group], [ready], Interval(num_groups=1, num_filtered=0, rewards=(1.0,)))
    report = PushReport(version=1, num_replicas=1, num_failed=0, num_bytes=1, push_s=1.0, pause_s=1.0)
    row |= describe_push(report, num_live_replicas=1)
    row |= StepClock().seconds()
    row |= describe_groups(GroupCounts(), num_duplicate=0, num_unreadable=0)
    patterns = explained()
    assert [name for name in row if not any(pattern.fullmatch(name) for pattern in patterns)] == []


@pytest.mark.parametrize("supervised", [False, True])
def test_every_metric_of_a_mixture_is_explained(tmp_path: Path, supervised: bool) -> None:
    """Those of its routers, in both kinds of training."""
    path = write_model(random_qwen3_moe(), tmp_path / "mixture")
    group = reader_of(path).read(make_group(path, index=0, rewards=(1.0, 0.0), version=1), IMAGES)
    config = TrainerConfig.model_validate({"device": "cpu"})
    if supervised:
        learner = InProcessSupervisedBackend(path, config, seed=0)
        learner.load(None)
        row = learner.step(list(group.sequences))
    else:
        backend = InProcessBackend(path, config, AlgorithmConfig(), seed=0, temperature=1.0)
        backend.load(None)
        row = take_step(backend, [[group]], 2)
    assert {"max_vio_mean", "max_vio_max", "unused_expert_fraction"} <= row.keys()
    patterns = explained()
    assert [name for name in row if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_the_names_of_other_frameworks_are_those_that_are_logged() -> None:
    """Each stands beside the metric whose number it has, and none is promised that nobody logs."""
    shown: dict[str, set[str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            ours, *_, others = (re.findall(r"`([\w<>/]+)`", cell) for cell in line.strip("|").split(" | "))
            for name in (name for name in others if "/" in name or name in _UNGROUPED):
                shown.setdefault(name, set()).update(ours)
    logged = {theirs: ours for ours, names in FIELD_NAMES.items() for theirs in names}
    assert shown.keys() == logged.keys()
    assert [name for name, ours in logged.items() if ours not in shown[name]] == []
