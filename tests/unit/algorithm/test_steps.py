"""Optimizer steps of a real model under the axes: the same for every cut, a reference beside the policy, bad input."""

import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import ConfigError, DataError, UserError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy.reference import ReferencePolicy
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainGroup, open_reader
from services.trainer.config import BackendConfig, OptimizerConfig
from services.trainer.telemetry.field_names import FIELD_NAMES, field_names
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.groups import IMAGES, make_group, picture

VERSION = 3


def backend_of(path: Path, *, micro_batch_tokens: int = 8192, **algorithm: Any) -> InProcessBackend:
    """One whose steps can be seen."""
    config = BackendConfig(
        device="cpu", micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    return InProcessBackend(
        path, config, AlgorithmConfig.model_validate(algorithm), seed=0, temperature=1.0, max_skipped_steps=1
    )


def loaded(path: Path, checkpoint: Path | None = None, **settings: Any) -> InProcessBackend:
    """One that has loaded the model, or a checkpoint."""
    backend = backend_of(path, **settings)
    backend.load(checkpoint)
    return backend


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Three with a signal and one of equal rewards, of versions 1, 2, 3, 3; the first two with a picture.

    The engine's log-probabilities are random, so the ratios to them are far from 1.
    """
    reader = open_reader(tiny_model_path)
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.5), (0.0, 1.0, 0.0, 0.0), (0.9, 0.9, 0.9, 0.9)]
    made = []
    for index, version in enumerate((1, 2, 3, 3)):
        shown: dict[str, Any] = {"images": [picture(index)], "placeholders": [9]} if index < 2 else {}
        group = make_group(tiny_model_path, index=index, rewards=rewards[index], version=version, **shown)
        made.append(reader.read(group, IMAGES))
    return made


def weights(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """A copy of them."""
    return {name: weight.clone() for name, weight in backend.export()}


def same_weights(one: InProcessBackend, other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(weight, other[name]) for name, weight in one.export())


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


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "gspo"},
        {"preset": "m2po", "rejection": {"max_m2": 9.0}},
        {"preset": "dppo", "entropy": {"kind": "bonus", "coef": 0.01}},
        {"preset": "ppo", "advantage": {"kind": "reinforce_pp"}, "kl": {"kind": "k1_in_reward", "coef": 0.1}},
        {"correction": {"kind": "clip", "level": "sequence", "low": 0.1, "normalize": True}, "kl": {"kind": "k3"}},
    ],
)
def test_the_step_is_the_same_however_the_batch_is_cut(
    tiny_model_path: Path, groups: list[TrainGroup], algorithm: dict[str, Any]
) -> None:
    """One row of everything, or each sample alone: loss, gradient norm and metrics of the real model agree."""
    times = {
        "step_time_s",
        "trained_tokens_per_s",
        "packing_density",
        "shared_token_fraction",
        "host_memory_peak_bytes",
    }
    results = []
    for micro_batch_tokens in (100_000, 1):
        backend = loaded(tiny_model_path, micro_batch_tokens=micro_batch_tokens, **algorithm)
        metrics = take_step(backend, [groups], VERSION)
        results.append({name: value for name, value in metrics.items() if name not in times})
    whole, cut = results
    assert whole["grad_norm"] > 0
    assert cut == pytest.approx(whole, rel=1e-3, abs=1e-5, nan_ok=True)


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


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}},
        {"correction": {"kind": "mask", "low": 0.9999, "high": 1.0001}},
        {"correction": {"kind": "none", "veto_low": 0.99}},
    ],
)
def test_a_batch_that_is_wholly_rejected_skips_the_step(
    tiny_model_path: Path, groups: list[TrainGroup], algorithm: dict[str, Any]
) -> None:
    """Said in the metrics and the log; too many in a row end the run."""
    backend = loaded(tiny_model_path, **algorithm)
    before = weights(backend)
    with structlog.testing.capture_logs() as logs:
        metrics = take_step(backend, [groups], VERSION)
    assert (metrics["skipped"], metrics["rejected_fraction"]) == (1, 1)
    assert "every token with an advantage was rejected" in logs[-1]["reason"]
    assert same_weights(backend, before)
    with pytest.raises(UserError, match=r"2 steps in a row were skipped.*\[algorithm\]"):
        take_step(backend, [groups], VERSION)


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


ALL_REJECTED = {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}}


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


def test_the_reference_stays_where_the_run_began(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """The first step has distance 0 and the gradient of a run without it; later ones are pulled back."""
    free, held = loaded(tiny_model_path), loaded(tiny_model_path, kl={"kind": "k3", "coef": 10.0})
    first = take_step(held, [groups], VERSION)
    assert first["kl_reference"] == pytest.approx(0, abs=1e-7)
    assert first["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(take_step(free, [groups], VERSION)["grad_norm"], rel=1e-3)
    start = {name: weight.float() for name, weight in loaded(tiny_model_path).export()}
    for _ in range(8):
        last = take_step(held, [groups], VERSION)
        take_step(free, [groups], VERSION)
    assert last["kl_loss"] > 0

    def distance(backend: InProcessBackend) -> float:
        return sum(float((weight - start[name]).square().sum()) for name, weight in backend.export())

    assert distance(held) < distance(free)


def test_the_reference_follows_the_policy(tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path) -> None:
    """copy: after every second step it is the policy. ema: it goes a share of the way."""
    backend = loaded(tiny_model_path, kl={"kind": "k2", "refresh": "copy", "refresh_every": 2})
    distances = [abs(take_step(backend, [groups], VERSION)["kl_reference"]) for _ in range(3)]
    assert distances[1] > 1e-3
    assert distances[0] < 1e-7
    assert distances[2] < 1e-7
    half = loaded(tiny_model_path, kl={"kind": "k2", "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5})
    start = weights(half)
    take_step(half, [groups], VERSION)
    half.save(tmp_path)
    reference = tensors_of(tmp_path / "reference")
    for name, now in half.policy.model.named_parameters():
        expected = (start[name] + now.detach()) / 2
        torch.testing.assert_close(reference[name], expected, rtol=0, atol=1e-6)


def test_the_reference_moves_to_the_device_once_a_step(
    tiny_model_path: Path, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks it has; after the step, or one that was left out, its copy there is gone."""
    copies: list[weakref.ref[torch.Tensor]] = []
    functional_call = torch.func.functional_call

    def seen(policy: Any, held: dict[str, torch.Tensor], inputs: Any) -> Any:
        (one, *_) = held.values()
        if not any(copy() is one for copy in copies):
            copies.append(weakref.ref(one))
        return functional_call(policy, held, inputs)

    monkeypatch.setattr(torch.func, "functional_call", seen)
    config = BackendConfig(device="cpu", dtype="bfloat16", optimizer=OptimizerConfig(offload=True))
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3"}})
    backend = InProcessBackend(tiny_model_path, config, algorithm, seed=0, temperature=1.0)
    backend.load(None)
    for end in (backend.finish_step, backend.abort_step):
        backend.begin_step(VERSION)
        for group in groups:
            backend.accumulate([group])
        assert len(copies) == 1
        end()
        assert copies.pop()() is None


def test_reference_and_entropy_go_on_from_a_checkpoint(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """Two steps, a checkpoint, a third; or the checkpoint loaded and the third: equal to the bit."""
    settings: dict[str, Any] = {
        "kl": {"kind": "k3", "coef": 0.1, "refresh": "copy", "refresh_every": 3},
        "entropy": {"kind": "target", "coef": 0.01, "target": 50.0, "adjustment": 0.004},
    }
    backend = loaded(tiny_model_path, **settings)
    assert [take_step(backend, [groups], VERSION)["entropy_coef"] for _ in range(2)] == pytest.approx([0.01, 0.014])
    backend.save(tmp_path)
    expected = take_step(backend, [groups], VERSION)
    assert expected["entropy_coef"] == pytest.approx(0.018)
    resumed = loaded(tiny_model_path, tmp_path, **settings)
    again = take_step(resumed, [groups], VERSION)
    assert {name: again[name] for name in ("loss", "kl_loss", "entropy_loss", "grad_norm")} == {
        name: expected[name] for name in ("loss", "kl_loss", "entropy_loss", "grad_norm")
    }
    assert abs(take_step(resumed, [groups], VERSION)["kl_reference"]) < 1e-7  # the third step refreshed it


def test_a_resumed_run_cannot_invent_its_reference(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """The weights that the run began with are gone; the present ones would be another reference."""
    backend = loaded(tiny_model_path)
    take_step(backend, [groups], VERSION)
    backend.save(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.kind = 'k2' needs a reference policy, but .* without one"):
        loaded(tiny_model_path, tmp_path, kl={"kind": "k2"})


def test_the_entropy_bonus_stops_above_its_target(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Entropy here is about 5 nats: above a target of 1 the first step has the bonus, the next ones none."""
    backend = loaded(tiny_model_path, entropy={"kind": "target", "coef": 0.01, "target": 1.0})
    assert [take_step(backend, [groups], VERSION)["entropy_coef"] for _ in range(3)] == [0.01, 0, 0]


def test_other_frameworks_names_hold_what_a_step_measures(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Each is the value of a metric that exists; the loop measures times and truncated samples."""
    masked = replace(groups[0], masked=(True,) * 4)
    of_the_loop = {"wait_s": 1.0, "step_s": 2.0, "push_s": 3.0, "truncated_fraction": 0.5, "train_s": 0.5}
    of_the_loop |= {"trainer_idle_fraction": 0.75, "checkpoint_write_s": 4.0}
    rejecting = {"rejection": {"kind": "opsm", "max_drop": 1e3}}
    row = take_step(loaded(tiny_model_path, **rejecting), [[*groups, masked]], VERSION) | of_the_loop
    assert set(FIELD_NAMES) <= set(row)
    named = field_names(row)
    assert not set(named) & set(row)
    assert named["actor/grad_norm"] == named["optim/grad_norm"] == row["grad_norm"]
    assert named["mismatch_kl/mean"] == row["kl_k3"]
    assert named["time/wait_for_batch"] == 1
    assert row["num_groups_without_gradient"] == 2
    assert named["frac_reward_zero_std"] == 1 / 5, "masked samples have no gradient, but their rewards differ"
    assert set(field_names({"grad_norm": 1.0})) == set(FIELD_NAMES["grad_norm"])


def test_a_bonus_raises_the_entropy(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Against the same steps without it."""
    plain = loaded(tiny_model_path)
    bonus = loaded(tiny_model_path, entropy={"kind": "bonus", "coef": 1.0})
    for _ in range(5):
        without, with_it = take_step(plain, [groups], VERSION), take_step(bonus, [groups], VERSION)
    assert with_it["entropy"] > without["entropy"]
