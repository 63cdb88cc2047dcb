"""Axes that no preset puts together, each against an independent plain implementation, and shares by their definition.

`test_papers` has the presets and each axis by itself.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.metrics.tokens import token_stats
from tests.support.trainer import papers
from tests.support.trainer.paper_checks import SEEDS, TOLERANCE, check, computed, plain
from tests.support.trainer.papers import PaperSample
from tests.support.trainer.token_batches import VERSION, algorithm, random_batch


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_of_sequence_ratios(seed: int) -> None:
    """A token's weight is its sample's geometric mean ratio within the bounds; its gradient is that of its logprob."""
    batch = random_batch(seed, spread=1.0)
    samples, advantages = plain(batch), papers.dr_grpo(plain(batch))
    loss, gradient = 0.0, []
    for sample, advantage in zip(samples, advantages, strict=True):
        length = len(sample.tokens)
        mean = papers.ratio(sum(token.th - token.mu for token in sample.tokens) / length)[0]
        share = min(max(mean, 0.8), 1.2) * advantage / length / len(samples)
        loss -= sum(share * token.th for token in sample.tokens)
        gradient.append([-share] * length)
    region = {"ratio_low": 0.8, "ratio_high": 1.2}
    advantage, by = {"kind": "dr_grpo", "norm": "none"}, {"kind": "sequence"}
    config = algorithm("cispo", ratio="sequence", trust_region=region, advantage=advantage, aggregation=by)
    check(computed(batch, config), (loss, gradient))


BOUNDS: dict[str, Callable[[float], float]] = {
    "truncate": lambda w: min(w, 1.5),
    "mask": lambda w: w if 0.7 <= w <= 1.5 else 0.0,
    "clip": lambda w: min(max(w, 0.7), 1.5),
}


def is_vetoed(sample: PaperSample) -> bool:
    """Whether the engine and the policy disagree about a token by more than 0.3 to 50."""
    return any(not 0.3 <= papers.ratio(token.th - token.mu)[0] <= 50 for token in sample.tokens)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_corrections_of_samples_with_a_log_linear_anchor(kind: str, level: str, normalize: bool) -> None:
    """The anchor lies a version back: PPO's ratio is to it, and the weight is the anchor's against the engine.

    A veto compares the policy itself with the engine.
    """
    batch = random_batch(6)
    samples, advantages = plain(batch), papers.grpo(plain(batch))
    anchors, weights = [], []
    for sample in samples:
        lags = [max(1, VERSION - token.version) for token in sample.tokens]
        anchor = [t.mu + (lag - 1) / lag * (t.th - t.mu) for t, lag in zip(sample.tokens, lags, strict=True)]
        total = sum(at - token.mu for at, token in zip(anchor, sample.tokens, strict=True))
        raw = papers.ratio(total if level == "sequence" else total / len(anchor))[0]
        anchors.append(anchor)
        weights.append(0.0 if is_vetoed(sample) else BOUNDS[kind](raw))
    assert len(set(weights)) > 3
    mean = 1.0
    if normalize:
        judged = [w for sample, w in zip(samples, weights, strict=True) if not math.isnan(sample.reward)]
        mean = sum(judged) / len(judged)
    loss, gradient = 0.0, []
    for sample, anchor, weight, advantage in zip(samples, anchors, weights, advantages, strict=True):
        terms = [
            papers.ppo_term(token.th - at, advantage, 0.2, 0.2) for token, at in zip(sample.tokens, anchor, strict=True)
        ]
        share = weight / mean / papers.total(samples)
        loss -= sum(share * value for value, _ in terms)
        gradient.append([-share * slope for _, slope in terms])
    bounds: dict[str, Any] = {"kind": kind, "level": level, "high": 1.5, "normalize": normalize}
    bounds |= {} if kind == "truncate" else {"low": 0.7}
    bounds |= {"veto_low": 0.3, "veto_high": 50}
    check(computed(batch, algorithm("ppo", anchor="log_linear", correction=bounds)), (loss, gradient))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_veto_without_a_correction(seed: int) -> None:
    """The plain policy gradient of the samples that are not vetoed, over the tokens of all."""
    batch = random_batch(seed)
    samples, advantages = plain(batch), papers.grpo(plain(batch))
    gradient = [
        [-(not is_vetoed(sample)) * advantage / papers.total(samples)] * len(sample.tokens)
        for sample, advantage in zip(samples, advantages, strict=True)
    ]
    assert 0 < sum(map(is_vetoed, samples)) < len(samples)
    found = computed(batch, algorithm(correction={"kind": "none", "veto_low": 0.3, "veto_high": 50}))
    check(found, (sum(map(sum, gradient)), gradient))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", ["batch", "batch_std"])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_norms_of_every_estimator(kind: str, norm: str, seed: int) -> None:
    """batch: whitened over the tokens of judged samples, groups without spread stay 0. batch_std: over the samples'
    standard deviation.
    """
    batch = random_batch(seed)
    samples = plain(batch)
    values = getattr(papers, kind)(samples)
    if norm == "batch":
        expected = papers.whitened(samples, values, keeps_zero_groups=True)
    else:
        judged = [value for sample, value in zip(samples, values, strict=True) if not math.isnan(sample.reward)]
        mean = sum(judged) / len(judged)
        variance = sum((value - mean) ** 2 for value in judged) / (len(judged) - 1)
        expected = [value / math.sqrt(variance + 1e-8) for value in values]
    config = AdvantageConfig.model_validate({"kind": kind, "norm": norm})
    found = sample_advantages(batch.rewards_G, batch.group_G, batch.num_tokens_G, config)
    assert found == pytest.approx(expected, **TOLERANCE)


def effective_share(weights: list[float]) -> float:
    """(sum w)^2 / (N sum w^2), Kish's effective sample size as a share."""
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.parametrize("seed", SEEDS)
def test_effective_shares(seed: int) -> None:
    """Of the ratios to the anchor, and of the weights, over all tokens; one that stands for three counts as three."""
    batch = random_batch(seed)
    counts = np.random.default_rng(seed).integers(1, 4, len(batch.sample_N)).tolist()
    config = algorithm("ppo", anchor="log_linear", correction={"kind": "clip", "low": 0.5, "high": 3.0})
    tokens = batch.tokens(batch.theta_HV).detached()
    loss = policy_loss(tokens, batch.samples(config), config)
    metrics = token_stats(tokens, loss, config, version=VERSION, counts_N=torch.tensor(counts, dtype=torch.float64))
    ratios, weights = [], []
    for token, count in zip([token for sample in plain(batch) for token in sample.tokens], counts, strict=True):
        lag = max(1, VERSION - token.version)
        ratios += [papers.ratio((token.th - token.mu) / lag)[0]] * count
        weights += [min(max(papers.ratio((token.th - token.mu) * (lag - 1) / lag)[0], 0.5), 3.0)] * count
    assert metrics["ratio_ess"] == pytest.approx(effective_share(ratios), **TOLERANCE)
    assert metrics["tis_ess"] == pytest.approx(effective_share(weights), **TOLERANCE)
    assert metrics["ratio_ess"] < metrics["tis_ess"] < 1
