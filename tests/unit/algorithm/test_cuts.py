"""Loss, gradient and metrics are those of the batch, however it is cut into micro-batches and in whatever order."""

from dataclasses import astuple, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.metrics.tokens import token_stats
from services.trainer.algorithm.statistics import batch_statistics, needs_statistics
from services.trainer.algorithm.tokens import concatenated
from tests.support.trainer.token_batches import (
    ALGORITHMS,
    VERSION,
    TokenBatch,
    algorithm,
    random_batch,
    unseen_choices,
)

ENTROPY_COEF = 0.05
NUM_SAMPLES = 18
"""Of `random_batch`."""


def run(
    batch: TokenBatch, cuts: list[list[int]], config: AlgorithmConfig
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of micro-batches of these samples, as a train step computes them."""
    theta = batch.theta_HV.clone().requires_grad_()
    samples = batch.samples(config)
    statistics = None
    if needs_statistics(config):
        with torch.no_grad():
            seen = [batch.tokens(theta, cut).detached() for cut in cuts]
        statistics = batch_statistics(concatenated(seen), samples, config)
    loss = 0.0
    seen = []
    for cut in cuts:
        tokens = batch.tokens(theta, cut)
        part = policy_loss(tokens, samples, config, statistics=statistics, entropy_coef=ENTROPY_COEF).value
        part.backward()
        loss += float(part.detach())
        seen.append(tokens.detached())
    whole = concatenated(seen)
    terms = policy_loss(whole, samples, config, statistics=statistics, entropy_coef=ENTROPY_COEF)
    assert theta.grad is not None
    return loss, theta.grad, token_stats(whole, terms, config, version=VERSION)


def test_every_kind_of_every_axis_is_cut() -> None:
    """But how a reference is refreshed, which comes after the step."""
    assert {key for key, _ in unseen_choices(ALGORITHMS.values())} <= {"kl.refresh"}


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """Any order of the samples, in any number of micro-batches."""
    order = draw(st.permutations(range(NUM_SAMPLES)))
    ends = sorted(draw(st.sets(st.integers(1, NUM_SAMPLES - 1))))
    return [order[start:end] for start, end in pairwise([0, *ends, NUM_SAMPLES])]


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=8, derandomize=True)  # huge ratios that cancel would be off by more once in hundreds of seeds
@given(st.integers(0, 2**32 - 1), cuts())
@example(0, [[sample] for sample in range(NUM_SAMPLES)])
def test_a_cut_changes_nothing(name: str, seed: int, cut: list[list[int]]) -> None:
    """Of any batch: each sample alone, and any other."""
    batch, config = random_batch(seed), ALGORITHMS[name]
    assert len(batch.rewards_G) == NUM_SAMPLES
    expected = run(batch, [list(range(NUM_SAMPLES))], config)
    assert expected[1].abs().sum() > 0
    loss, gradient, metrics = run(batch, cut, config)
    assert loss == pytest.approx(expected[0], rel=1e-11, abs=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-9, atol=1e-12 * float(expected[1].abs().max() + 1))
    assert metrics == pytest.approx(expected[2], rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", ["m2po", "correction: clip", "kl: k1 in reward"])
def test_statistics_of_a_micro_batch_are_not_those_of_the_batch(name: str) -> None:
    """The test above can fail: with statistics of each micro-batch by itself, the gradient depends on the cut."""
    batch, config = random_batch(0), ALGORITHMS[name]
    theta = batch.theta_HV.clone().requires_grad_()
    samples = batch.samples(config)
    for sample in range(18):
        tokens = batch.tokens(theta, [sample])
        statistics = batch_statistics(tokens.detached(), samples, config)
        policy_loss(tokens, samples, config, statistics=statistics).value.backward()
    whole = run(batch, [list(range(18))], config)[1]
    assert float((theta.grad - whole).abs().max()) > 1e-3 * float(whole.abs().max())


@pytest.mark.parametrize(
    "rejection", [{"kind": "opsm", "max_drop": 0.0}, {"kind": "k3", "max_k3": 0.05}, {"kind": "m2po", "max_m2": 1e-9}]
)
def test_rejected_tokens_do_not_make_others_heavier(rejection: dict[str, object]) -> None:
    """The gradient with a rejection is that of the kept tokens in the batch without it."""
    batch = random_batch(1)
    config = algorithm("ppo", rejection=rejection, trust_region={"kind": "none"})
    tokens, samples = batch.tokens(batch.theta_HV).detached(), batch.samples(config)
    statistics = batch_statistics(tokens, samples, config)
    kept = policy_loss(tokens, samples, config, statistics=statistics)
    plain = policy_loss(tokens, samples, algorithm("ppo", trust_region={"kind": "none"}))
    assert 0 < kept.rejected_N.sum() < len(kept.rejected_N)
    weights = samples.weights_G[tokens.sample_N]
    expected = -(weights * plain.region.objective_N)[~kept.rejected_N].sum()
    torch.testing.assert_close(kept.value, expected)


NOT_ELIGIBLE = [1, 5, 10, 12]
"""Masked samples of several groups; the last is not judged anyway."""


@pytest.mark.parametrize("name", ["m2po", "correction: clip", "correction: sequence", "kl: k1 in reward"])
def test_statistics_are_of_samples_that_are_judged_and_not_masked(name: str) -> None:
    """Whatever log-probabilities the others have, no statistic and no gradient feels them."""
    batch, config = random_batch(0), ALGORITHMS[name]
    is_other_N = torch.isin(batch.sample_N, torch.tensor(NOT_ELIGIBLE))
    logprobs_N = batch.tokens(batch.theta_HV).logprobs_N
    changed_batch = replace(
        batch,
        engine_N=torch.where(is_other_N, logprobs_N - 0.2, batch.engine_N),
        reference_N=torch.where(is_other_N, batch.reference_N - 3.0, batch.reference_N),
    )
    found = []
    for changed in (batch, changed_batch):
        theta = changed.theta_HV.clone().requires_grad_()
        tokens, samples = changed.tokens(theta), changed.samples(config, masked=NOT_ELIGIBLE)
        statistics = batch_statistics(tokens.detached(), samples, config)
        policy_loss(tokens, samples, config, statistics=statistics).value.backward()
        found.append((statistics, theta.grad))
    (expected, gradient), (statistics, changed_gradient) = found
    assert astuple(statistics) == pytest.approx(astuple(expected), rel=1e-12)
    torch.testing.assert_close(changed_gradient, gradient, rtol=1e-10, atol=1e-14)
    assert gradient.abs().sum() > 0
    everyone = [batch_statistics(b.tokens(b.theta_HV), b.samples(config), config) for b in (batch, changed_batch)]
    assert everyone[0] != everyone[1], "unmasked, the change is felt"


@pytest.mark.parametrize("name", ["m2po", "correction: clip", "correction: sequence", "kl: k1 in reward"])
def test_a_batch_of_masked_samples_has_no_statistics(name: str) -> None:
    """And no gradient, rather than a number that is none."""
    batch, config = random_batch(2), ALGORITHMS[name]
    samples = batch.samples(config, masked=range(18))
    theta = batch.theta_HV.clone().requires_grad_()
    tokens = batch.tokens(theta)
    statistics = batch_statistics(tokens.detached(), samples, config)
    loss = policy_loss(tokens, samples, config, statistics=statistics)
    loss.value.backward()
    assert float(loss.value.detach()) == 0
    assert not theta.grad.any()
