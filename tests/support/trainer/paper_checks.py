"""The trainer's loss beside a plain implementation of its formula: the same batch for both, and their comparison."""

import pytest

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.statistics import batch_statistics
from services.trainer.algorithm.tokens import Tokens
from tests.support.trainer.papers import PaperSample, Result, Token
from tests.support.trainer.token_batches import TokenBatch

SEEDS = range(4)
TOLERANCE = {"rel": 1e-6, "abs": 1e-9}


def plain(batch: TokenBatch) -> list[PaperSample]:
    """The batch in Python's own types."""
    tokens = batch.tokens(batch.theta_HV)
    assert tokens.entropy_N is not None
    columns = (tokens.logprobs_N, batch.engine_N, batch.reference_N, batch.versions_N, tokens.entropy_N)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    made = [Token(th=th, mu=mu, ref=ref, version=version, entropy=h) for th, mu, ref, version, h in rows]
    numbers = batch.sample_N.tolist()
    return [
        PaperSample(
            reward=float(batch.rewards_G[sample]),
            group=int(batch.group_G[sample]),
            tokens=[token for token, number in zip(made, numbers, strict=True) if number == sample],
        )
        for sample in range(len(batch.rewards_G))
    ]


def computed(batch: TokenBatch, config: AlgorithmConfig, *, entropy_coef: float = 0.0) -> Result:
    """Loss and gradient of the whole batch, sample by sample."""
    given = batch.tokens(batch.theta_HV).detached()
    leaf = given.logprobs_N.clone().requires_grad_()
    samples = batch.samples(config)
    tokens = Tokens(
        logprobs_N=leaf,
        engine_logprobs_N=given.engine_logprobs_N,
        versions_N=given.versions_N,
        sample_N=given.sample_N,
        entropy_N=given.entropy_N,
        reference_logprobs_N=given.reference_logprobs_N,
    )
    statistics = batch_statistics(given, samples, config)
    loss = policy_loss(tokens, samples, config, statistics=statistics, entropy_coef=entropy_coef).value
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), [part.tolist() for part in leaf.grad.split(batch.num_tokens_G.tolist())]


def check(found: Result, expected: Result) -> None:
    """Loss and every derivative."""
    assert found[0] == pytest.approx(expected[0], **TOLERANCE)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine == pytest.approx(theirs, **TOLERANCE)
