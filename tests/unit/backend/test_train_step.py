"""The optimizer step: the same however it is cut, nothing from groups without a signal, and no step into the void."""

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import UserError
from penstock.model.tokens import forbidden_token_ids
from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.batch import MEASURED_EVERY, measured_samples
from services.trainer.backend.files.checkpoint_share import MODEL
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.optimizer.adamw import ADAM_EPS, MAX_SKIPPED_STEPS
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.batching.sequences import TrainGroup
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import OptimizerConfig, TrainerConfig
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.read_groups import groups_with_pictures
from tests.support.trainer.rows import row_of


def config(**changes: Any) -> TrainerConfig:
    """A trainer whose steps are large enough to be seen."""
    return TrainerConfig(**{"device": "cpu", "optimizer": OptimizerConfig(learning_rate=1e-3), **changes})


def backend_of(
    path: Path,
    trainer_config: TrainerConfig,
    checkpoint: Path | None = None,
    *,
    adam_eps: float = ADAM_EPS,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
    **algorithm: Any,
) -> InProcessBackend:
    """One that has loaded the model, or the checkpoint."""
    axes = AlgorithmConfig.model_validate(algorithm)
    backend = InProcessBackend(
        path,
        trainer_config,
        axes,
        seed=0,
        temperature=1.0,
        adam_eps=adam_eps,
        max_skipped_steps=max_skipped_steps,
    )
    backend.load(checkpoint)
    return backend


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Two with a signal, one of equal rewards; all with a picture; versions 1, 2, 2."""
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.9, 0.9, 0.9, 0.9), (0.0, 0.0, 1.0, 0.0)]
    return groups_with_pictures(tiny_model_path, rewards=rewards, versions=[1, 2, 2])


def weights(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """A copy of them."""
    return {name: weight.clone() for name, weight in backend.export()}


def largest_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Over all weights."""
    return max(float((before[name] - after[name]).abs().max()) for name in before)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 60},
        {"share_prompts": False},
        {"fixed_rows": True, "micro_batch_tokens": 100},
        {"fixed_rows": True, "micro_batch_tokens": 400, "row_lengths": 4},
    ],
    ids=str,
)
def test_the_step_is_the_same_however_the_batch_is_cut(
    tiny_model_path: Path, groups: list[TrainGroup], aggregation: str, changes: dict[str, Any]
) -> None:
    """One row of all groups with shared prompts, or any other cut: same loss, same gradient norm, same weights."""
    results = []
    for cut in ({}, changes):
        backend = backend_of(
            tiny_model_path,
            config(
                **cut,
            ),
            adam_eps=1e-3,  # else a step is the sign of the gradient
            aggregation={"kind": aggregation},
        )
        metrics = take_step(backend, [groups], 2)
        results.append((metrics, weights(backend)))
    (whole, whole_weights), (cut, cut_weights) = results
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert largest_change(whole_weights, cut_weights) < 1e-6


def test_the_gradient_is_that_of_the_formula(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Of -1/tokens * sum w A logp over every sample, equal groups in the denominator; computed sample by sample."""
    backend = backend_of(tiny_model_path, config())
    reference = load_policy(tiny_model_path, temperature=1.0, forbidden_ids=forbidden_token_ids(tiny_model_path))
    num_tokens = sum(sequence.num_own_tokens for group in groups for sequence in group.sequences)
    for group in groups:
        advantages = sample_advantages(group.rewards, [0] * 4, [1] * 4, AdvantageConfig())
        for sequence, advantage in zip(group.sequences, advantages, strict=True):
            row = row_of(sequence)
            logprobs = reference(row).logprobs_N
            weight = (logprobs.detach() - row.engine_logprobs_N).exp().clamp(max=2.0)
            (-(weight * logprobs).sum() * float(advantage) / num_tokens).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters() if p.grad is not None))
    assert take_step(backend, [groups], 2)["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_equal_rewards_change_nothing_but_are_counted(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """A batch of them leaves every weight; beside others they only add to the denominator."""
    backend = backend_of(tiny_model_path, config())
    before = weights(backend)
    metrics = take_step(backend, [[groups[1]]], 2)
    assert largest_change(before, weights(backend)) == 0
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert metrics["num_groups_without_gradient"] == 1
    assert metrics["dlogp_mean"] > 0
    with_equal = take_step(backend_of(tiny_model_path, config()), [groups], 2)
    without = take_step(backend_of(tiny_model_path, config()), [[groups[0], groups[2]]], 2)
    assert with_equal["grad_norm"] == pytest.approx(without["grad_norm"] * 2 / 3, rel=1e-4)


def test_good_samples_become_likelier_and_bad_ones_less(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Ten steps on the same group separate them."""
    backend = backend_of(tiny_model_path, config())

    def gap() -> float:
        group = groups[2]
        with torch.no_grad():
            each = [float(backend.policy(row_of(s)).logprobs_N.mean()) for s in group.sequences]
        return each[2] - (each[0] + each[1] + each[3]) / 3

    before = gap()
    for _ in range(10):
        metrics = take_step(backend, [[groups[2]]], 2)
    assert gap() > before + 0.5
    assert metrics["kl_k3"] > 0


def test_metrics_say_how_stale_and_how_far_off(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """One group of three lags by a version."""
    metrics = take_step(backend_of(tiny_model_path, config()), [groups], 2)
    assert metrics["staleness_max"] == 1
    assert metrics["staleness_mean"] == pytest.approx(1 / 3)
    assert metrics["reward_mean"] == pytest.approx((2 + 3.6 + 1) / 12)
    assert metrics["num_tokens"] == 54
    assert metrics["num_measured_tokens"] == 41  # without three of the four samples of equal rewards
    assert metrics["num_tokens_lag_0"] == 18 + 4 * 5  # the fourth sample stands for those of its group
    assert metrics["skipped"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_say_how_rows_are_filled_and_what_is_shared(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """By hand: a prompt of 37 tokens; answers of 3 to 6, of which the last token is not read; one sample measured."""
    own, prompt = 2 + 3 + 4 + 5, 37
    metrics = take_step(backend_of(tiny_model_path, config()), [groups], 2)
    assert metrics["packing_density"] == 1
    read, unshared = 2 * (prompt + own) + prompt + 4, 2 * (4 * prompt + own) + prompt + 4
    assert metrics["shared_token_fraction"] == pytest.approx(1 - read / unshared)
    fixed = config(share_prompts=False, fixed_rows=True, micro_batch_tokens=200)
    metrics = take_step(backend_of(tiny_model_path, fixed), [groups], 2)
    assert metrics["shared_token_fraction"] == 0
    assert metrics["packing_density"] == pytest.approx(unshared / (3 * 256))
    steps = config(share_prompts=False, fixed_rows=True, micro_batch_tokens=256, row_lengths=4)
    metrics = take_step(backend_of(tiny_model_path, steps), [groups], 2)
    assert metrics["packing_density"] == pytest.approx(unshared / (256 + 128 + 64))


def test_few_samples_without_gradient_are_computed() -> None:
    """One in eight, others at every version so that each gets its turn, and never none."""
    flat = list(range(100, 120))
    chosen = [measured_samples(flat, version) for version in range(8)]
    assert sorted(number for part in chosen for number in part) == flat
    assert max(map(len, chosen)) == 3
    assert measured_samples(flat, 8) == chosen[0]
    assert [measured_samples([7, 9], version) for version in range(4)] == [[7], [9], [7], [9]]
    assert measured_samples([], 5) == []


def test_metrics_estimate_the_whole_batch(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """One of the four samples of equal rewards is computed at each version, and counts for all four.

    They have 18 tokens like those of each other group. Over four versions each is seen once.
    """
    backend = backend_of(tiny_model_path, config())
    seen = [take_step(backend, [groups], version) for version in range(4, 8)]
    assert all(metrics["num_measured_tokens"] < metrics["num_tokens"] for metrics in seen)
    estimates = [sum(metrics[name] for name in metrics if name.startswith("num_tokens_lag_")) for metrics in seen]
    assert len(set(estimates)) == 4
    assert sum(estimates) / 4 == seen[0]["num_tokens"]
    of_flat = [estimate - 36 for estimate in estimates]
    lags = [
        (18 * (version - 1) + (18 + flat) * (version - 2)) / (36 + flat)
        for version, flat in zip(range(4, 8), of_flat, strict=True)
    ]
    assert [metrics["token_lag_mean"] for metrics in seen] == pytest.approx(lags)


def test_the_mean_weight_of_the_batch_is_over_all_samples(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """With `normalize` the loss depends on samples without gradient, so all are computed."""
    backend = backend_of(tiny_model_path, config(), correction={"kind": "truncate", "high": 2.0, "normalize": True})
    metrics = take_step(backend, [groups], 2)
    assert metrics["num_measured_tokens"] == metrics["num_tokens"] == 54


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "m2po"},
        {"preset": "ppo", "advantage": {"kind": "reinforce_pp"}, "kl": {"kind": "k1_in_reward", "coef": 0.1}},
    ],
    ids=["m2po", "k1_in_reward"],
)
def test_other_statistics_of_the_batch_do_not_need_samples_without_gradient(
    tiny_model_path: Path, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """The step is the same to the bit if all of them are computed: those of equal rewards, and masked ones."""
    batch = [*groups[:2], replace(groups[2], masked=(False, True, False, True))]
    results = []
    for measured_every in (MEASURED_EVERY, 1):
        monkeypatch.setattr("services.trainer.backend.batch.MEASURED_EVERY", measured_every)
        backend = backend_of(tiny_model_path, config(), **algorithm)
        results.append((take_step(backend, [batch], 2), weights(backend)))
    (some, some_weights), (every, every_weights) = results
    assert some["num_measured_tokens"] < every["num_measured_tokens"] == every["num_tokens"]
    assert (some["loss"], some["grad_norm"]) == (every["loss"], every["grad_norm"])
    assert some["grad_norm"] > 0
    assert largest_change(some_weights, every_weights) == 0


def broken(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """The groups with an engine logprob of infinity, which makes the loss NaN or infinite."""
    sequence = groups[0].sequences[0]
    logprobs = sequence.engine_logprobs_X.copy()
    logprobs[sequence.loss_mask_X] = math.nan
    bad = replace(sequence, engine_logprobs_X=logprobs)
    return [replace(groups[0], samples=((bad,), *groups[0].samples[1:]))]


def test_a_loss_that_is_not_finite_is_skipped_and_ends_the_run_when_it_stays(
    tiny_model_path: Path, groups: list[TrainGroup]
) -> None:
    """Weights, optimizer and schedule stay; a good step between them starts the count anew."""
    backend = backend_of(
        tiny_model_path, config(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=9)), max_skipped_steps=1
    )
    before = weights(backend)
    assert take_step(backend, [broken(groups)], 2)["skipped"] == 1
    assert largest_change(before, weights(backend)) == 0
    metrics = take_step(backend, [groups], 2)
    assert metrics["skipped"] == 0
    assert metrics["learning_rate"] == pytest.approx(1e-4)  # the first of the warm-up, not the second
    after = weights(backend)
    take_step(backend, [broken(groups)], 2)
    with pytest.raises(UserError, match="2 steps in a row"):
        take_step(backend, [broken(groups)], 2)
    assert largest_change(after, weights(backend)) == 0


def test_resumes_from_a_checkpoint_as_if_nothing_had_happened(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """Two steps, a checkpoint, one more step; or the checkpoint loaded and the same step: equal to the bit."""
    settings = config(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5))
    backend = backend_of(tiny_model_path, settings)
    for _ in range(2):
        take_step(backend, [groups], 2)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(2, {"version": 3}, backend.save)
    expected_draw = torch.rand(3)
    metrics = take_step(backend, [groups], 3)

    checkpoint = store.latest()
    assert checkpoint is not None
    resumed = backend_of(tiny_model_path, settings, checkpoint.path)
    assert torch.equal(torch.rand(3), expected_draw)
    again = take_step(resumed, [groups], 3)
    assert (again["loss"], again["learning_rate"]) == (metrics["loss"], metrics["learning_rate"])
    assert largest_change(weights(backend), weights(resumed)) == 0


def test_a_checkpoints_model_folder_is_whole(tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path) -> None:
    """Tokenizer, processor and template load from it, and nothing of the base model is missing."""
    from transformers import AutoProcessor

    backend = backend_of(tiny_model_path, config())
    backend.save(tmp_path)
    assert {path.name for path in tiny_model_path.iterdir()} <= {path.name for path in (tmp_path / "model").iterdir()}
    AutoProcessor.from_pretrained(tmp_path / "model")
    assert forbidden_token_ids(tmp_path / "model") == forbidden_token_ids(tiny_model_path)


def test_others_may_read_a_checkpoints_weights(tiny_model_path: Path, tmp_path: Path) -> None:
    """As far as the umask lets them, like the files beside them."""
    umask = os.umask(0o027)
    try:
        backend_of(tiny_model_path, config()).save(tmp_path)
    finally:
        os.umask(umask)
    weights = [*tmp_path.rglob("*.safetensors")]
    assert weights
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*weights, tmp_path / "trainer.pt")} == {0o640}


def test_bfloat16_computes_and_pushes_in_bfloat16_and_keeps_master_weights(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """A step smaller than bfloat16 can tell apart is not lost; the gradient is float32's within a few percent."""
    small = OptimizerConfig(learning_rate=1e-6)
    backend = backend_of(tiny_model_path, config(dtype="bfloat16", optimizer=small))
    assert {weight.dtype for _, weight in backend.export()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in backend.policy.parameters()} == {torch.bfloat16}
    backend.save(tmp_path)
    before = tensors_of(tmp_path / MODEL)
    metrics = take_step(backend, [groups], 2)
    backend.save(tmp_path)
    after = tensors_of(tmp_path / MODEL)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert all(0 < float((after[name] - weight).abs().max()) < 2e-6 for name, weight in before.items())
    exact = take_step(backend_of(tiny_model_path, config(optimizer=small)), [groups], 2)
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert metrics["dlogp_mean"] == pytest.approx(exact["dlogp_mean"], rel=0.02)


def test_recomputing_activations_changes_nothing(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Gradient checkpointing: same loss, same gradient norm."""
    plain = take_step(backend_of(tiny_model_path, config()), [groups], 2)
    recomputed = take_step(backend_of(tiny_model_path, config(gradient_checkpointing=True)), [groups], 2)
    assert recomputed["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert recomputed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_a_resume_logs_every_setting_that_changed(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """By name, with the checkpoint's value and the recipe's; the next step uses the recipe's."""
    before = config(optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=3))
    first = backend_of(tiny_model_path, before)
    take_step(first, [groups], 2)
    checkpoint = CheckpointStore(tmp_path, keep=1).save(1, {}, first.save)
    recipe = config(
        optimizer=OptimizerConfig(learning_rate=3e-5, betas=(0.9, 0.99), warmup_steps=3),
        micro_batch_tokens=100,
    )
    with structlog.testing.capture_logs() as logs:
        resumed = backend_of(tiny_model_path, recipe, checkpoint.path, correction={"high": 1.5})
    changed = {entry["setting"]: (entry["checkpoint"], entry["recipe"]) for entry in logs}
    assert changed == {
        "trainer.optimizer.learning_rate": (1e-4, 3e-5),
        "trainer.optimizer.betas": ([0.9, 0.999], [0.9, 0.99]),
        "algorithm.correction.high": (2.0, 1.5),
        "trainer.micro_batch_tokens": (8192, 100),
    }
    assert {entry["event"] for entry in logs} == {"setting.changed"}
    assert take_step(resumed, [groups], 2)["learning_rate"] == pytest.approx(3e-5 / 2)
    with structlog.testing.capture_logs() as logs:
        backend_of(tiny_model_path, before, checkpoint.path)
    assert logs == []
