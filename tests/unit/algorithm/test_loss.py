"""The GRPO loss: numbers and gradients by hand, limits, and independence of how a batch is cut."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.axes import AggregationConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.metrics.tokens import token_stats
from services.trainer.algorithm.tokens import Samples, Tokens


def tensor(*values: float) -> torch.Tensor:
    """float64, so that hand computations agree to the last digits."""
    return torch.tensor(values, dtype=torch.float64)


def algorithm(preset: str, **sections: Any) -> AlgorithmConfig:
    """A preset with other values in some sections."""
    return AlgorithmConfig.model_validate({"preset": preset, **sections})


def tokens_of(logprobs: torch.Tensor, engine: torch.Tensor, versions: torch.Tensor | None = None) -> Tokens:
    """Samples of one token each."""
    numbers = torch.arange(len(logprobs))
    return Tokens(
        logprobs_N=logprobs,
        entropy_N=torch.zeros_like(engine),
        engine_logprobs_N=engine,
        versions_N=torch.zeros_like(numbers) if versions is None else versions,
        sample_N=numbers,
    )


def samples_of(advantages: torch.Tensor) -> Samples:
    """Weight 1 on each token."""
    return Samples(
        advantages_G=advantages,
        weights_G=torch.ones_like(advantages),
        eligible_G=torch.ones_like(advantages, dtype=torch.bool),
        version=0,
    )


def weights_of(counts: np.ndarray, kind: str) -> np.ndarray:
    """Of samples of one group."""
    return token_weights(counts, np.zeros(len(counts)), AggregationConfig.model_validate({"kind": kind}))


def stats_of(tokens: Tokens, advantages: torch.Tensor, config: AlgorithmConfig, *, version: int) -> dict[str, float]:
    """Metrics of samples of one token."""
    loss = policy_loss(tokens, samples_of(advantages), config)
    return token_stats(tokens, loss, config, version=version)


def loss_and_gradient(
    logprobs: torch.Tensor, engine: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[float, list[float]]:
    """Loss with weight 1 on each token, and its gradient by the logprobs."""
    logprobs = logprobs.clone().requires_grad_()
    loss = policy_loss(tokens_of(logprobs, engine), samples_of(advantages), config).value
    loss.backward()
    return float(loss.detach()), logprobs.grad.tolist()


def test_tis_weighs_the_policy_gradient_by_the_truncated_ratio() -> None:
    """Ratios to the engine 1/2, 1, 3 with cap 2: the loss is -(1/2 * 1 - 1 * 1 + 2 * 2) and its gradient -w A."""
    logprobs = tensor(-1, -1, -1)
    engine = logprobs - tensor(0.5, 1, 3).log()
    loss, gradient = loss_and_gradient(logprobs, engine, tensor(1, -1, 2), algorithm("tis"))
    assert loss == pytest.approx(-3.5)
    assert gradient == pytest.approx([-0.5, 1, -4])


def test_tis_without_a_cap_is_plain_importance_sampling() -> None:
    """cap -> infinity leaves every weight alone."""
    _, gradient = loss_and_gradient(
        tensor(-1), tensor(-1 - math.log(300)), tensor(1), algorithm("tis", correction={"high": 1e9})
    )
    assert gradient == pytest.approx([-300])


@pytest.mark.parametrize("preset", ["tis", "ppo"])
def test_on_policy_both_are_reinforce_with_group_advantages(preset: str) -> None:
    """Where trainer and engine agree, the gradient is -A and the loss minus the mean of A."""
    logprobs = tensor(-0.3, -2.0)
    loss, gradient = loss_and_gradient(logprobs, logprobs, tensor(1.5, -0.5), algorithm(preset))
    assert loss == pytest.approx(-1)
    assert gradient == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 1, -1.1, -1.1),
        (1.5, 1, -1.3, 0),  # above 1 + clip_high, and better: clipped
        (1.5, -1, 1.5, 1.5),  # above, but worse: the pessimistic branch keeps its gradient
        (0.5, 1, -0.5, -0.5),
        (0.5, -1, 0.8, 0),  # below 1 - clip_low, and worse: clipped
    ],
)
def test_ppo_clips_the_ratio_to_the_engine(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    """clip_low 0.2, clip_high 0.3: all branches of min(r A, clip(r) A)."""
    config = algorithm("ppo", trust_region={"clip_low": 0.2, "clip_high": 0.3})
    found = loss_and_gradient(tensor(-1), tensor(-1 - math.log(ratio)), tensor(advantage), config)
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx([gradient])


def test_huge_log_ratios_stay_finite() -> None:
    """A token that the engine found all but impossible must not make infinities."""
    for preset in ("tis", "ppo"):
        loss, gradient = loss_and_gradient(tensor(-0.1, -900), tensor(-900, -0.1), tensor(-1, -1), algorithm(preset))
        assert math.isfinite(loss)
        assert all(map(math.isfinite, gradient))


CLAMPED = (tensor(0, -25, 0, -19), tensor(-25, 0, -19, 0))
"""Log ratios of 25, -25, 19 and -19."""


@pytest.mark.parametrize(
    ("sections", "clamped"),
    [
        ({}, 1 / 2),
        ({"trust_region": {"kind": "none"}}, 1 / 2),
        ({"trust_region": {"kind": "dppo_tv", "tv_low": 1.0, "tv_high": 1.0}}, 1 / 2),
        ({"trust_region": {"kind": "dppo_tv", "tv_low": 1.0, "tv_high": 1.0, "cap": 9.0}}, 0),
        ({"trust_region": {"kind": "cispo"}}, 0),
        ({"ratio": "sequence", "aggregation": {"kind": "sequence"}}, 1 / 2),
    ],
    ids=str,
)
def test_stats_count_the_tokens_that_the_clamp_of_the_log_ratio_silences(
    sections: dict[str, Any], clamped: float
) -> None:
    """Beyond ±20, where the ratio has the gradient; exactly the tokens whose gradient is 0 are not trained."""
    config = algorithm("ppo", **sections)
    advantages = tensor(-1, 1, -1, 1)
    assert stats_of(tokens_of(*CLAMPED), advantages, config, version=0)["clamped_fraction"] == clamped
    _, gradient = loss_and_gradient(*CLAMPED, advantages, config)
    trained = policy_loss(tokens_of(*CLAMPED), samples_of(advantages), config).trained_N
    assert [value != 0 for value in gradient] == trained.tolist()


def test_token_weighs_tokens_equally_and_sequence_samples() -> None:
    """Samples of 1, 3 and 4 tokens."""
    counts = np.array([1, 3, 4])
    assert weights_of(counts, "token").tolist() == [1 / 8] * 3
    np.testing.assert_allclose(weights_of(counts, "sequence"), [1 / 3, 1 / 9, 1 / 12])
    for aggregation in ("token", "sequence"):
        assert (weights_of(counts, aggregation) * counts).sum() == pytest.approx(1)


@pytest.mark.parametrize("preset", ["tis", "ppo"])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_micro_batches_add_up_to_the_batch(preset: str, aggregation: str) -> None:
    """Loss and gradient of any cut equal those of the whole."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 6)
    total = int(counts.sum())
    numbers = torch.from_numpy(np.repeat(np.arange(6), counts))
    logprobs, engine = (torch.from_numpy(rng.normal(size=total)) for _ in range(2))
    samples = Samples(
        advantages_G=torch.from_numpy(rng.normal(size=6)),
        weights_G=torch.from_numpy(weights_of(counts, aggregation)),
        eligible_G=torch.ones(6, dtype=torch.bool),
        version=0,
    )

    def run(cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logprobs.clone().requires_grad_()
        parts = zip(*(part.split(cuts) for part in (leaf, engine, engine, numbers, numbers)), strict=True)
        names = ("logprobs_N", "entropy_N", "engine_logprobs_N", "versions_N", "sample_N")
        cut = [Tokens(**dict(zip(names, part, strict=True))) for part in parts]
        loss = sum(policy_loss(tokens, samples, algorithm(preset)).value for tokens in cut)
        loss.backward()
        return loss.detach(), leaf.grad

    whole = run([total])
    for cut in (1, 5, total - 1):
        torch.testing.assert_close(run([cut, total - cut]), whole)


def test_stats_by_hand() -> None:
    """d = log 2 on a current token, -log 2 on one two versions old: k1 = 0, k3 = (1 - log 2 + log 2 - 1/2) / 2."""
    log2 = math.log(2)
    tokens = tokens_of(tensor(-1 + log2, -1 - log2), tensor(-1, -1), torch.tensor([7, 5]))
    config = algorithm("tis", correction={"high": 1.5})
    metrics = stats_of(tokens, tensor(1, 1), config, version=7)
    assert metrics["kl_k1"] == pytest.approx(0)
    assert metrics["kl_k3"] == pytest.approx(0.25)
    assert metrics["tis_mean"] == pytest.approx((1.5 + 0.5) / 2)
    assert metrics["tis_capped_fraction"] == 0.5
    assert metrics["token_lag_mean"] == 1
    assert metrics["token_lag_max"] == 2
    for name in ("dlogp_mean", "dlogp_max_current", "dlogp_mean_lag_2"):
        assert metrics[name] == pytest.approx(log2)
    assert metrics["num_measured_tokens"] == 2
    assert metrics["num_tokens_lag_2"] == 1


def test_the_distance_to_the_anchor_is_that_of_the_ratio() -> None:
    """Log ratios log 2 and -30 to the engine, clamped to -20: their mean if the engine is the anchor. Else none."""
    tokens = tokens_of(tensor(-1, -31), tensor(-1 - math.log(2), -1))
    to_engine = stats_of(tokens, tensor(1, 1), algorithm("ppo"), version=0)
    assert to_engine["kl_anchor"] == pytest.approx((20 - math.log(2)) / 2)
    assert to_engine["kl_k1"] == pytest.approx((30 - math.log(2)) / 2)
    to_itself = stats_of(tokens, tensor(1, 1), algorithm("tis"), version=0)["kl_anchor"]
    assert (to_itself, math.copysign(1, to_itself)) == (0, 1)


@pytest.mark.parametrize("preset", ["tis", "ppo", "decoupled_ppo"])
def test_a_token_that_stands_for_three_counts_three_times(preset: str) -> None:
    """Means, shares and counts by lag are those of the batch in which its three copies were measured."""
    config = algorithm(preset)
    values = {"logprobs": tensor(-1, -2, -0.5), "engine": tensor(-1.4, -0.3, -1.9), "advantages": tensor(1, -1, 0)}
    versions, places = torch.tensor([7, 6, 5]), torch.tensor([0, 1, 2, 2, 2])
    few = tokens_of(values["logprobs"], values["engine"], versions)
    all_of_them = tokens_of(values["logprobs"][places], values["engine"][places], versions[places])
    loss = policy_loss(few, samples_of(values["advantages"]), config)
    estimated = token_stats(few, loss, config, version=7, counts_N=tensor(1, 1, 3))
    expected = stats_of(all_of_them, values["advantages"][places], config, version=7)
    assert (estimated.pop("num_measured_tokens"), expected.pop("num_measured_tokens")) == (3, 5)
    assert estimated == pytest.approx(expected)


def test_stats_count_clipped_tokens_only_where_the_clip_bites() -> None:
    """Ratio 2 clips a good token, 1/2 a bad one; the other two keep their gradient."""
    tokens = tokens_of(tensor(2, 2, 0.5, 0.5).log(), tensor(0, 0, 0, 0))
    metrics = stats_of(tokens, tensor(1, -1, 1, -1), algorithm("ppo"), version=0)
    assert metrics["clip_fraction"] == 0.5
    assert "tis_mean" not in metrics


def test_rejected_tokens_are_counted_by_what_rejects_them_and_by_sign() -> None:
    """The clip drops a good token that rose, a bad one that fell and, by its dual bound, one that rose fourfold; the
    rejection drops that one and another without an advantage."""
    tokens = tokens_of(tensor(2, 0.5, 4, 4, 1).log(), tensor(0, 0, 0, 0, 0))
    config = algorithm("ppo", trust_region={"dual": 3.0}, rejection={"kind": "geometric", "low": 0.1, "high": 3.5})
    metrics = stats_of(tokens, tensor(1, -1, -1, 0, 1), config, version=0)
    found = {
        axis: [metrics[f"rejected_fraction_{axis}{sign}"] for sign in ("", "_low", "_high")]
        for axis in ("trust_region", "rejection")
    }
    assert found == {
        "trust_region": pytest.approx([3 / 5, 2 / 5, 1 / 5]),
        "rejection": pytest.approx([2 / 5, 1 / 5, 0]),
    }
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 5)
    without = stats_of(tokens, tensor(1, -1, -1, 0, 1), algorithm("ppo"), version=0)
    assert not {"dual_clip_fraction", "rejected_fraction_rejection_low"} & without.keys()
