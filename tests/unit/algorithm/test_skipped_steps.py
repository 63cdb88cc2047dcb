"""Bad input and rejected batches: a group or a step is skipped, said and counted, and nothing is silently zero."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import DataError, UserError
from services.trainer.backend.base import take_step
from services.trainer.backend.policy.reference import ReferencePolicy
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainGroup
from tests.support.trainer.steps import VERSION, loaded, same_weights, weights

ALL_REJECTED = {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}}


def with_logprob(group: TrainGroup, value: float) -> TrainGroup:
    """The group with another engine log-probability of its first own token."""
    sequence = group.sequences[0]
    logprobs = sequence.engine_logprobs_X.copy()
    logprobs[sequence.loss_mask_X.argmax()] = value
    return replace(group, samples=((replace(sequence, engine_logprobs_X=logprobs),), *group.samples[1:]))


def moved(group: TrainGroup, *, better: float, worse: float) -> TrainGroup:
    """The group with engine log-probabilities that are `better` and `worse` nats from the policy's, or about."""
    best = max(group.rewards)
    samples = tuple(
        (replace(each, engine_logprobs_X=each.engine_logprobs_X - (better if reward == best else worse)),)
        for each, reward in zip(group.sequences, group.rewards, strict=True)
    )
    return replace(group, samples=samples)


def with_broken_picture(group: TrainGroup) -> TrainGroup:
    """The group with a picture for which the model computes no number."""
    [image] = group.sequences[0].images
    broken = replace(image, pixel_values_PD=torch.full_like(image.pixel_values_PD, math.nan))
    return replace(group, samples=tuple((replace(sequence, images=(broken,)),) for sequence in group.sequences))


@pytest.mark.parametrize("broken", ["engine", "reward", "forward"])
@pytest.mark.parametrize("micro_batch_tokens", [8192, 1])
def test_a_group_that_is_not_finite_is_skipped_and_counted(
    tiny_model_path: Path, groups: list[TrainGroup], broken: str, micro_batch_tokens: int
) -> None:
    """It counts in the denominator: the gradient is that of the batch in which it has no signal.

    With a row for each sample, the forward pass that fails comes after the gradient of others.
    """
    bad = {
        "engine": with_logprob(groups[1], math.nan),
        "reward": replace(groups[1], rewards=(1.0, math.inf, 0.0, 0.0)),
        "forward": with_broken_picture(groups[1]),
    }[broken]
    with structlog.testing.capture_logs() as logs:
        backend = loaded(tiny_model_path, micro_batch_tokens=micro_batch_tokens)
        metrics = take_step(backend, [[groups[0], bad, *groups[2:]]], VERSION)
    silent = replace(groups[1], rewards=(0.5, 0.5, 0.5, 0.5))
    expected = take_step(loaded(tiny_model_path), [[groups[0], silent, *groups[2:]]], VERSION)
    assert metrics["num_groups_skipped"] == 1
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["num_tokens"] == expected["num_tokens"]
    assert [(entry["event"], entry["index"]) for entry in logs] == [("group.skipped", 1)]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "m2po"},
        {"preset": "cispo"},
        {"preset": "decoupled_ppo"},
        {"preset": "gspo"},
        {"preset": "ppo", "advantage": {"kind": "reinforce_pp"}, "kl": {"kind": "k1_in_reward", "coef": 0.1}},
        {"correction": {"kind": "clip", "level": "sequence", "low": 0.1, "normalize": True}, "kl": {"kind": "k3"}},
    ],
    ids=str,
)
def test_a_group_that_is_not_finite_spoils_no_statistic_of_the_batch(
    tiny_model_path: Path, groups: list[TrainGroup], algorithm: dict[str, Any]
) -> None:
    """Where samples are compared over the batch, too: the others are trained, and every metric is a number."""
    metrics = take_step(
        loaded(tiny_model_path, **algorithm), [[groups[0], with_logprob(groups[1], math.nan), *groups[2:]]], VERSION
    )
    assert (metrics["num_groups_skipped"], metrics["skipped"]) == (1, 0)
    assert metrics["grad_norm"] > 0
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


@pytest.mark.parametrize("micro_batch_tokens", [8192, 1])
def test_a_group_for_which_the_reference_computes_no_number_is_skipped(
    tiny_model_path: Path, groups: list[TrainGroup], micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that breaks on one picture costs its group, not the step."""
    compute = ReferencePolicy.logprobs

    def breaks_on_the_second_group(reference: ReferencePolicy, rows: Iterable[PackedRow]) -> list[torch.Tensor]:
        given = list(rows)
        computed = compute(reference, given)
        for row, logprobs_N in zip(given, computed, strict=True):
            logprobs_N[(row.sample_N >= 4) & (row.sample_N < 8)] = math.nan
        return computed

    monkeypatch.setattr(ReferencePolicy, "logprobs", breaks_on_the_second_group)
    backend = loaded(tiny_model_path, micro_batch_tokens=micro_batch_tokens, kl={"kind": "k3", "coef": 0.1})
    metrics = take_step(backend, [groups], VERSION)
    assert (metrics["num_groups_skipped"], metrics["skipped"]) == (1, 0)
    assert metrics["grad_norm"] > 0
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


def test_a_batch_without_a_finite_group_skips_the_step(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Nothing changes, and the second time in a row the run ends."""
    backend = loaded(tiny_model_path)
    before = weights(backend)
    batch = [with_logprob(group, math.inf) for group in groups]
    metrics = take_step(backend, [batch], VERSION)
    assert (metrics["skipped"], metrics["num_groups_skipped"]) == (1, 4)
    assert same_weights(backend, before)
    with pytest.raises(UserError, match=r"2 steps in a row were skipped, .* no group has finite rewards"):
        take_step(backend, [batch], VERSION)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 3], [2]]], ids=["whole", "chunks"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    tiny_model_path: Path, groups: list[TrainGroup], cut: list[list[int]]
) -> None:
    """Although every log-probability and the loss are: nothing changes, and the next step feels nothing of it."""
    chunks = [[groups[number] for number in chunk] for chunk in cut]
    backend = loaded(tiny_model_path)
    before = weights(backend)
    broken = next(backend.policy.parameters()).register_hook(lambda gradient: gradient.fill_(math.nan))
    with structlog.testing.capture_logs() as logs:
        metrics = take_step(backend, chunks, VERSION)
    assert math.isfinite(metrics["loss"])
    assert (metrics["skipped"], metrics["num_groups_skipped"], metrics["num_updates"]) == (1, 0, 0)
    assert [entry["event"] for entry in logs] == ["step.skipped"]
    assert "gradient norm nan" in logs[0]["reason"]
    assert same_weights(backend, before)
    broken.remove()
    take_step(backend, chunks, VERSION)
    untouched = loaded(tiny_model_path)
    take_step(untouched, chunks, VERSION)
    assert same_weights(backend, weights(untouched))


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[3], [0, 1], [2]]], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}},
        {"correction": {"kind": "mask", "low": 0.9999, "high": 1.0001}},
        {"correction": {"kind": "none", "veto_low": 0.99}},
    ],
)
def test_a_batch_that_is_wholly_rejected_skips_the_step(
    tiny_model_path: Path, groups: list[TrainGroup], algorithm: dict[str, Any], cut: list[list[int]]
) -> None:
    """Said in the metrics and the log; too many in a row end the run."""
    backend = loaded(tiny_model_path, **algorithm)
    before = weights(backend)
    with structlog.testing.capture_logs() as logs:
        metrics = take_step(backend, [[groups[number] for number in chunk] for chunk in cut], VERSION)
    assert (metrics["skipped"], metrics["rejected_fraction"]) == (1, 1)
    assert "every token with an advantage was rejected" in logs[-1]["reason"]
    assert same_weights(backend, before)
    with pytest.raises(UserError, match=r"2 steps in a row were skipped.*\[algorithm\]"):
        take_step(backend, [groups], VERSION)


def test_a_chunk_that_is_wholly_rejected_leaves_the_step_to_the_others(
    tiny_model_path: Path, groups: list[TrainGroup]
) -> None:
    """First or last: its samples count in the denominator alone, as those of equal rewards do."""
    rejected = moved(groups[2], better=50.0, worse=-50.0)
    algorithm = {"preset": "ppo", "rejection": {"kind": "geometric", "low": 1e-6, "high": 1e6}}
    flat = replace(rejected, rewards=(0.5,) * len(rejected.rewards))
    expected = take_step(loaded(tiny_model_path, **algorithm), [[groups[0], flat, groups[1]]], VERSION)
    for cut in ([[rejected], [groups[0], groups[1]]], [[groups[0], groups[1]], [rejected]]):
        metrics = take_step(loaded(tiny_model_path, **algorithm), cut, VERSION)
        assert metrics["skipped"] == 0
        assert 0 < metrics["rejected_fraction"] < 1
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_batch_whose_log_ratios_are_all_clamped_skips_the_step_and_names_the_cause(
    tiny_model_path: Path, groups: list[TrainGroup]
) -> None:
    """Its gradient is exactly 0, which AdamW's averages would turn into a step all the same."""

    far = [moved(group, better=-50.0, worse=50.0) for group in (groups[0], groups[2])]
    backend = loaded(tiny_model_path, preset="ppo")
    before = weights(backend)
    with structlog.testing.capture_logs() as logs:
        metrics = take_step(backend, [far], VERSION)
    found = {name: metrics[name] for name in ("skipped", "grad_norm", "rejected_fraction", "clamped_fraction")}
    assert found == {"skipped": 1, "grad_norm": 0, "rejected_fraction": 1, "clamped_fraction": 1}
    assert "100% of them for a log ratio of policy to anchor beyond ±20" in logs[-1]["reason"]
    assert same_weights(backend, before)
    with pytest.raises(UserError, match=r"2 steps in a row were skipped.*check model\.path and rollout\.dtype"):
        take_step(backend, [far], VERSION)


def test_a_batch_that_is_wholly_outside_the_trust_region_skips_the_step(
    tiny_model_path: Path, groups: list[TrainGroup]
) -> None:
    """Good samples became likelier and bad ones less since they were sampled: far, but not beyond the clamp."""
    far = [moved(group, better=10.0, worse=-10.0) for group in (groups[0], groups[2])]
    with structlog.testing.capture_logs() as logs:
        metrics = take_step(loaded(tiny_model_path, preset="ppo"), [far], VERSION)
    assert (metrics["skipped"], metrics["rejected_fraction"], metrics["clamped_fraction"]) == (1, 1, 0)
    assert "every token with an advantage was rejected (trust_region clip" in logs[-1]["reason"]


@pytest.mark.parametrize(
    "regulariser", [{"drift": 0.1}, {"kl": {"kind": "k3", "coef": 0.1}}, {"entropy": {"kind": "bonus", "coef": 0.1}}]
)
def test_a_regulariser_acts_where_everything_is_rejected(
    tiny_model_path: Path, groups: list[TrainGroup], regulariser: dict[str, Any]
) -> None:
    """The policy is held although no sample teaches it. The reference is the policy itself until the second step."""
    backend = loaded(tiny_model_path, **ALL_REJECTED, **regulariser)
    if "kl" in regulariser:
        with torch.no_grad():
            for parameter in backend.policy.parameters():
                parameter.mul_(1.01)
    before = weights(backend)
    metrics = take_step(backend, [groups], VERSION)
    assert (metrics["skipped"], metrics["rejected_fraction"]) == (0, 1)
    assert metrics["grad_norm"] > 0
    assert not same_weights(backend, before)


def test_an_entropy_bonus_of_0_does_not_act(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """As above its target: the rejected batch is skipped."""
    entropy = {"kind": "target", "coef": 0.0, "adjustment": 1e-3, "target": 9.0}
    metrics = take_step(loaded(tiny_model_path, **ALL_REJECTED, entropy=entropy), [groups], VERSION)
    assert (metrics["skipped"], metrics["grad_norm"]) == (1, 0)


def test_equal_rewards_are_no_rejection(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """A batch without any advantage is a step without a gradient, not a skipped one."""
    metrics = take_step(
        loaded(tiny_model_path, preset="ppo", rejection={"kind": "k3", "max_k3": 1e-12}), [groups[3:]], VERSION
    )
    assert (metrics["skipped"], metrics["grad_norm"], metrics["rejected_fraction"]) == (0, 0, 0)


def test_maxrl_refuses_rewards_below_zero(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Its baseline would change its sign."""
    bad = replace(groups[0], rewards=(1.0, -1.0, 1.0, -1.0))
    with pytest.raises(DataError, match=r"advantage\.kind = 'maxrl' needs rewards of at least 0, found -1"):
        take_step(loaded(tiny_model_path, advantage={"kind": "maxrl"}), [[bad]], VERSION)
