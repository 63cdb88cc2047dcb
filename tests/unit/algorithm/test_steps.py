"""What optimizer steps of a real model measure under the axes, and what entropy bonuses do."""

from dataclasses import replace
from pathlib import Path

from services.trainer.backend.base import take_step
from services.trainer.batching.sequences import TrainGroup
from services.trainer.telemetry.field_names import FIELD_NAMES, field_names
from tests.support.trainer.steps import VERSION, loaded, same_weights, weights


def test_the_entropy_bonus_stops_above_its_target(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Entropy here is about 5 nats: above a target of 1 the first step has the bonus, the next ones none."""
    backend = loaded(tiny_model_path, entropy={"kind": "target", "coef": 0.01, "target": 1.0})
    assert [take_step(backend, [groups], VERSION)["entropy_coef"] for _ in range(3)] == [0.01, 0, 0]


def test_equal_rewards_change_nothing_while_the_entropy_bonus_is_paused(
    tiny_model_path: Path, groups: list[TrainGroup]
) -> None:
    """Above its target: the averages that AdamW has from a step before move no weight."""
    backend = loaded(tiny_model_path, entropy={"kind": "target", "coef": 0.01, "target": 1.0})
    take_step(backend, [groups], VERSION)
    before = weights(backend)
    metrics = take_step(backend, [[groups[3]]], VERSION)
    assert same_weights(backend, before)
    assert (metrics["entropy_coef"], metrics["grad_norm"], metrics["skipped"]) == (0, 0, 0)
    assert metrics["num_measured_tokens"] < metrics["num_tokens"], "samples without gradient are not all computed"


def test_a_bonus_raises_the_entropy(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Against the same steps without it."""
    plain = loaded(tiny_model_path)
    bonus = loaded(tiny_model_path, entropy={"kind": "bonus", "coef": 1.0})
    for _ in range(5):
        without, with_it = take_step(plain, [groups], VERSION), take_step(bonus, [groups], VERSION)
    assert with_it["entropy"] > without["entropy"]


def test_other_frameworks_names_hold_what_a_step_measures(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Each is the value of a metric that exists; the loop measures times and truncated samples."""
    masked = replace(groups[0], masked=(True,) * 4)
    of_the_loop = {"wait_s": 1.0, "step_s": 2.0, "push_s": 3.0, "truncated_fraction": 0.5, "train_s": 0.5}
    of_the_loop |= {"trainer_idle_fraction": 0.75, "checkpoint_write_s": 4.0}
    of_the_loop |= {"mfu": 0.4}  # of a GPU
    rejecting = {"preset": "ppo", "trust_region": {"dual": 3.0}, "rejection": {"kind": "opsm", "max_drop": 1e3}}
    correcting = {"anchor": "proximal", "correction": {"kind": "truncate"}}
    row = take_step(loaded(tiny_model_path, **rejecting, **correcting), [[*groups, masked]], VERSION) | of_the_loop
    assert set(FIELD_NAMES) <= set(row)
    named = field_names(row)
    assert not set(named) & set(row)
    assert named["actor/grad_norm"] == named["optim/grad_norm"] == row["grad_norm"]
    assert named["mismatch_kl/mean"] == row["kl_k3"]
    assert named["sampling/importance_sampling_ratio/mean"] == row["tis_mean"]
    assert named["time/wait_for_batch"] == 1
    assert row["num_groups_without_gradient"] == 2
    assert named["frac_reward_zero_std"] == 1 / 5, "masked samples have no gradient, but their rewards differ"
    assert set(field_names({"grad_norm": 1.0})) == set(FIELD_NAMES["grad_norm"])
