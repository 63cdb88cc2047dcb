"""docs/metrics.md explains every metric that a step logs."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.admission.group_state import GroupCounts
from services.trainer.admission.pools import Pool
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.config import TrainerConfig
from services.trainer.flow.filter_tally import Interval
from services.trainer.sft.sequences import DemonstrationReader
from services.trainer.telemetry.episode_metrics import describe_episodes
from services.trainer.telemetry.field_names import FIELD_NAMES, field_names
from services.trainer.telemetry.gradient_streak import GradientStreak
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.step_metrics import describe_batch, describe_filters, describe_groups, describe_pools
from tests.support.trainer.data.sft import demonstration
from tests.support.trainer.families import random_qwen3_moe, write_model
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.read_groups import reader_of
from tests.support.trainer.runs.gated_loop import GatedCheckpoints, Rows, running
from tests.support.waiting import until

_UNGROUPED = {"reward", "solve_none", "solve_all", "frac_reward_zero_std"}
"""Names of other frameworks without a group."""

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"

ALGORITHMS: list[dict[str, object]] = [
    {},
    {"preset": "dppo", "kl": {"kind": "k3"}, "entropy": {"kind": "bonus"}, "drift": 0.1},
    {"preset": "slime_geo3k", "correction": {"kind": "mask", "veto_low": 1e-4}, "rejection": {"kind": "opsm"}},
    {"preset": "ppo", "trust_region": {"dual": 3.0}},
]

ELSEWHERE = {
    *("mfu", "device_memory_peak_bytes"),  # of a GPU
    "replayed_token_fraction",  # of engines that report experts
    "weights_digest",  # of a recorder
    *("max_staleness", "num_episodes_dropped"),  # of a run's settings and episodes
    *("num_passed_over_demonstrations", "demonstration_epoch"),  # of a run with a file of them
}
"""Metrics that no step of these tests has."""

OF_THE_FIELD = {
    "prime-rl": """reward/all/mean mismatch_kl/mean entropy/mean is_masked/mean is_masked_low/mean is_masked_high/mean
        masked_advantage_positive masked_advantage_negative optim/lr optim/grad_norm perf/throughput perf/mfu
        perf/peak_memory time/step time/wait_for_batch time/forward_backward time/broadcast_weights time/save_ckpt
        max_vio/mean""",
    "verl": """actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/grad_norm
        actor/lr actor/kl_loss critic/score/mean critic/rewards/mean response_length/mean response_length/clip_ratio
        rollout_corr/kl rollout_corr/k3_kl rollout_corr/rollout_is_mean rollout_corr/rollout_is_eff_sample_size
        rollout_corr/rollout_rs_masked_fraction timing_s/step timing_s/update_actor timing_s/update_weights""",
    "slime": """train/loss train/pg_loss train/entropy_loss train/pg_clipfrac train/kl_loss train/tis train/tis_clipfrac
        train/ois opsm_clipfrac train/train_rollout_logprob_abs_diff train/grad_norm rollout/raw_reward
        rollout/response_len/mean rollout/truncated_ratio rollout/repetition_frac rollout/zero_std/count_<reward>
        perf/train_time perf/train_wait_time perf/wait_time_ratio perf/step_time perf/update_weights_time
        perf/actor_train_tflops perf/actor_train_tok_per_s""",
    "AReaL": """ppo_actor/update/importance_weight/avg approx_kl behave_imp_weight behave_approx_kl
        ppo_actor/update/clip_ratio/avg ppo_actor/update/dual_clip_ratio/avg ppo_actor/update/entropy/avg""",
    "TRL": """clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max clip_ratio/region_mean
        sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/mean kl completions/mean_length
        completions/clipped_ratio frac_reward_zero_std""",
    "SkyRL": """async/staleness_mean async/staleness_max async/staleness_ratio staleness_violation_count keep_rate
        num_groups_dropped""",
}
"""Names that people who come from another framework look for."""


def named(text: str) -> list[str]:
    """The names of the tables' first columns, without those of settings; `<k>` stands for anything."""
    rows = [line for line in text.splitlines() if line.startswith("| `") and "`micro_batch_tokens`" not in line]
    return [name for row in rows for name in re.findall(r"`([\w<>/]+)`", row.split(" | ")[0])]


def pattern_of(name: str) -> re.Pattern[str]:
    """What matches the names that it stands for."""
    return re.compile(re.sub(r"<\w+>", r"\\w+", name))


def explained() -> list[re.Pattern[str]]:
    """All names of the page's tables."""
    return [pattern_of(name) for name in named(PAGE.read_text())]


def row_of(path: Path, algorithm: dict[str, object]) -> dict[str, Any]:
    """What a backend logs of a step, and what the controller adds."""
    group = make_group(path, index=0, rewards=(1.0, 0.0, 0.0, 1.0), version=1, images=[picture(0)], placeholders=[9])
    config = TrainerConfig.model_validate({"device": "cpu", "optimizer": {"learning_rates": {"tower": 1e-7}}})
    backend = InProcessBackend(
        path, config, AlgorithmConfig.model_validate(algorithm), seed=0, temperature=1.0, demonstration_coef=0.1
    )
    backend.load(None)
    ready = reader_of(path).read(group, IMAGES)
    backend.begin_step(2)
    backend.accumulate([ready])
    backend.add_demonstrations([DemonstrationReader.open(path).read(demonstration("Say one.", "one"))])
    row = backend.finish_step()() | describe_batch([group])
    row |= GradientStreak().observe(row)
    samples = tuple(msgspec.structs.replace(sample, metrics={"first_attempt": 1.0}) for sample in group.samples)
    row |= describe_episodes([msgspec.structs.replace(group, environment="geo3k_tools", samples=samples)])
    row |= describe_filters([group], [ready], Interval(num_groups=1, num_filtered=0, rewards=(1.0,)))
    row |= describe_groups(GroupCounts(), num_duplicate=0, num_unreadable=0)
    return row | describe_pools({Pool.EASY: 0.0, Pool.HARD: 0.0})


async def row_of_loop(folder: Path) -> dict[str, Any]:
    """What the loop and the file add to a step's metrics."""
    rows = Rows()
    async with running(folder, rows=rows, checkpoints=GatedCheckpoints(write_s=1.0)) as run:
        run.finish(0, 1, 2, 3)
        run.backend.go_on(2)
        await until(lambda: rows.written)
        run.stop.set()
        run.checkpoints.on_disk.set()
    file = MetricsLog(folder, last_step=0)
    file.write(rows.written[0])
    return file.rows()[0]


def row_of_mixture(folder: Path, *, supervised: bool) -> dict[str, float]:
    """What a backend logs of a step of a mixture of experts."""
    path = write_model(random_qwen3_moe(), folder / "mixture")
    group = reader_of(path).read(make_group(path, index=0, rewards=(1.0, 0.0), version=1), IMAGES)
    config = TrainerConfig.model_validate({"device": "cpu"})
    if supervised:
        learner = InProcessSupervisedBackend(path, config, seed=0)
        learner.load(None)
        return learner.step(list(group.sequences))
    backend = InProcessBackend(path, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    return take_step(backend, [[group]], 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_metric_is_explained(tiny_model_path: Path, algorithm: dict[str, object]) -> None:
    """Those of the backend under several algorithms, and those of the controller."""
    patterns = explained()
    row = row_of(tiny_model_path, algorithm)
    assert [name for name in row if not any(pattern.fullmatch(name) for pattern in patterns)] == []


async def test_every_explained_metric_is_written(tiny_model_path: Path, tmp_path: Path) -> None:
    """A name that is gone from the code, or misspelt on the page, is not promised; other frameworks' names of it are
    written with it."""
    logged = row_of_mixture(tmp_path, supervised=False) | await row_of_loop(tmp_path)
    for algorithm in ALGORITHMS:
        logged |= row_of(tiny_model_path, algorithm)
    logged |= field_names(logged)
    text = PAGE.read_text()
    text = text[text.index("## Names") : text.index("## Supervised training")]
    unwritten = {name for name in named(text) if not any(map(pattern_of(name).fullmatch, logged))}
    assert unwritten == ELSEWHERE
    aliases = {theirs for ours, names in FIELD_NAMES.items() if ours not in ELSEWHERE for theirs in names}
    assert aliases <= logged.keys()


@pytest.mark.parametrize("framework", OF_THE_FIELD)
def test_a_name_of_the_field_is_logged_or_its_absence_explained(framework: str) -> None:
    """On the page, where people look for it."""
    text = PAGE.read_text()
    assert [name for name in OF_THE_FIELD[framework].split() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("supervised", [False, True])
def test_every_metric_of_a_mixture_is_explained(tmp_path: Path, supervised: bool) -> None:
    """Those of its routers, in both kinds of training."""
    row = row_of_mixture(tmp_path, supervised=supervised)
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
