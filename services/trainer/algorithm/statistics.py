"""Statistics of the whole optimizer batch that the loss of each token depends on.

Legend: N = own tokens of the whole batch.

Invariant: they cover the samples that can have a policy gradient: judged, not masked, in a group whose numbers are all
finite. Equal rewards leave no sample out. But a sample with an advantage of 0 enters only the mean weight, so it need
not be computed where that mean is not used.

They come from one pass over the batch without gradient, before the first loss, and enter every loss as constants. So
loss, gradient and metrics do not depend on how the batch is cut, on its order, or on the number of ranks. Only
configurations that need them pay for the pass.
"""

from dataclasses import dataclass

from services.trainer.algorithm.advantage import whitening
from services.trainer.algorithm.anchor import anchor_logprobs
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.correction import correction_weights
from services.trainer.algorithm.rejection import m2_threshold
from services.trainer.algorithm.returns import token_advantages, token_returns
from services.trainer.algorithm.tokens import Samples, Tokens, sample_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """Constants of a batch."""

    mean_weight: float = 1.0
    """Mean importance weight: over tokens at level token, otherwise over samples."""
    m2_threshold: float = float("inf")
    """Squared log ratio up to which leaving tokens are kept."""
    return_mean: float = 0.0
    return_std: float = 0.0
    """Standard deviation of the tokens' returns; 0 if they are all equal."""


def needs_statistics(config: AlgorithmConfig) -> bool:
    """Return whether the loss needs the pass over the whole batch."""
    return config.correction.normalize or config.rejection.kind == "m2po" or config.kl.kind == "k1_in_reward"


def whole_batch_setting(config: AlgorithmConfig) -> str:
    """Return the setting that makes each sample's gradient depend on all samples of the batch; empty if none does.

    Without such a setting, a group's gradient is known once the group has arrived, up to the batch's denominator:
    backward may begin before the batch is complete.
    """
    advantage = config.advantage
    if advantage.kind in ("reinforce_pp", "reinforce_pp_baseline", "custom"):
        return f"algorithm.advantage.kind = {advantage.kind!r}"
    if advantage.norm != "none":
        return f"algorithm.advantage.norm = {advantage.norm!r}"
    if config.correction.normalize:
        return "algorithm.correction.normalize = true"
    if config.rejection.kind == "m2po":
        return "algorithm.rejection.kind = 'm2po'"
    return ""


def batch_statistics(tokens: Tokens, samples: Samples, config: AlgorithmConfig) -> BatchStatistics:
    """Return the statistics of a batch.

    Args:
        tokens: Detached tokens of the whole batch: at least those of every eligible sample that has a gradient, and
            with `correction.normalize` those of every eligible sample.
        samples: Detached samples of the batch.
        config: The axes.
    """
    tokens = tokens.of(samples.eligible_G[tokens.sample_N])
    if not len(tokens.sample_N):
        return BatchStatistics()
    mean_weight, threshold, mean, std = 1.0, float("inf"), 0.0, 0.0
    if config.correction.normalize:
        mean_weight = _mean_weight(tokens, samples, config)
    if config.kl.kind == "k1_in_reward":
        mean, std = whitening(token_returns(tokens, samples, config.kl).numpy())
    if config.rejection.kind == "m2po":
        advantages_N = token_advantages(tokens, samples, config.kl, mean=mean, std=std)
        threshold = m2_threshold(tokens.logprobs_N - tokens.engine_logprobs_N, advantages_N, config.rejection.max_m2)
    return BatchStatistics(mean_weight=mean_weight, m2_threshold=threshold, return_mean=mean, return_std=std)


def _mean_weight(tokens: Tokens, samples: Samples, config: AlgorithmConfig) -> float:
    anchor_N = anchor_logprobs(
        tokens.logprobs_N, tokens.engine_logprobs_N, tokens.versions_N, version=samples.version, kind=config.anchor
    )
    weights_N = correction_weights(
        anchor_N, tokens.logprobs_N, tokens.engine_logprobs_N, tokens.sample_N, config.correction
    ).weights_N
    if config.correction.level == "token":
        return float(weights_N.mean()) or 1.0
    share_N = 1 / sample_sums(weights_N * 0 + 1, tokens.sample_N)  # each token's share of its sample
    return float((weights_N * share_N).sum() / share_N.sum()) or 1.0
