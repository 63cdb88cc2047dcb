"""The loss of a micro-batch, composed of the axes.

Legend: N = the policy's own tokens of a micro-batch, sample by sample; no other token enters the loss.

    r_t    = exp(logp_t - anchor_t), or its geometric mean over the sample       anchor.py, ratio.py
    o_t    = r_t A as bounded by the trust region                                trust_region.py, advantage.py
    w_t    = weight of the anchor against the engine                             correction.py
    k_t    = 0 if the token is rejected, else 1                                  rejection.py
    p_t    = kl.coef KL_t + drift (logp_t - engine_t)^2 - entropy.coef H_t       regularisers.py
    loss   = sum_t weight_t (p_t - w_t k_t o_t)                                  weight_t: aggregation.py

The loss knows only tokens and samples, not how rows were cut, padded or packed. Invariant: the losses of the
micro-batches add up to the loss of the batch, however it is cut.
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithm.anchor import anchor_logprobs
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.correction import Correction, correction_weights
from services.trainer.algorithm.ratio import exp_ratio, is_clamped, policy_log_ratio
from services.trainer.algorithm.regularisers import drift_penalty, kl_penalty
from services.trainer.algorithm.rejection import rejected_tokens
from services.trainer.algorithm.returns import token_advantages
from services.trainer.algorithm.statistics import BatchStatistics
from services.trainer.algorithm.tokens import Samples, Tokens
from services.trainer.algorithm.trust_region import Step, Surrogate, ratio_has_gradient, surrogate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """The loss, and the effect of the axes on each token."""

    value: torch.Tensor
    """Scalar: the micro-batch's share of the loss of the optimizer batch."""
    policy: torch.Tensor
    """Scalar: the part that comes from advantages."""
    penalties: dict[str, torch.Tensor]
    """Scalars: the other parts by name, coefficients included."""
    advantages_N: torch.Tensor
    ratio_N: torch.Tensor
    """Ratio of policy to anchor."""
    clamped_N: torch.Tensor
    """bool: whether the token has no gradient because its log ratio is beyond `ratio.MAX_LOG_RATIO`."""
    region: Surrogate
    correction: Correction
    rejected_N: torch.Tensor
    """bool: whether the token is left out of the policy gradient."""

    @property
    def trained_N(self) -> torch.Tensor:
        """bool[N]: tokens that have a policy gradient."""
        excluded_N = self.region.outside_N | self.rejected_N | self.clamped_N
        return (self.advantages_N != 0) & (self.correction.weights_N > 0) & ~excluded_N


def policy_loss(
    tokens: Tokens,
    samples: Samples,
    config: AlgorithmConfig,
    *,
    statistics: BatchStatistics | None = None,
    entropy_coef: float = 0.0,
) -> Loss:
    """Return the loss of a micro-batch: its share of the loss of the optimizer batch.

    Args:
        tokens: Tokens of the micro-batch.
        samples: Samples of the optimizer batch.
        config: The axes.
        statistics: Statistics of the optimizer batch; None if `needs_statistics` is false.
        entropy_coef: Factor of the entropy bonus, from `regularisers.EntropyCoefficient`.
    """
    constants = statistics or BatchStatistics()
    logprobs_N, engine_N, sample_N = tokens.logprobs_N, tokens.engine_logprobs_N, tokens.sample_N
    advantages_N = token_advantages(tokens, samples, config.kl, mean=constants.return_mean, std=constants.return_std)
    weights_N = samples.weights_G[sample_N]
    anchor_N = anchor_logprobs(logprobs_N, engine_N, tokens.versions_N, version=samples.version, kind=config.anchor)
    correction = correction_weights(
        anchor_N, logprobs_N, engine_N, sample_N, config.correction, mean_weight=constants.mean_weight
    )
    rejected_N = rejected_tokens(
        logprobs_N.detach() - engine_N,
        advantages_N,
        sample_N,
        config.rejection,
        m2_threshold=constants.m2_threshold,
    )
    log_ratio_N = policy_log_ratio(logprobs_N, anchor_N, sample_N, level=config.ratio)
    ratio_N, clamped_N = exp_ratio(log_ratio_N), is_clamped(log_ratio_N)
    step = Step(ratio_N=ratio_N, logprobs_N=logprobs_N, anchor_N=anchor_N, advantages_N=advantages_N, sample_N=sample_N)
    region = surrogate(step, config.trust_region)
    policy = -(weights_N * correction.weights_N * ~rejected_N * region.objective_N).sum()
    penalties = _penalties(tokens, weights_N, config, entropy_coef)
    return Loss(
        value=sum(penalties.values(), policy),
        policy=policy,
        penalties=penalties,
        advantages_N=advantages_N,
        ratio_N=ratio_N,
        clamped_N=clamped_N if ratio_has_gradient(config.trust_region) else torch.zeros_like(clamped_N),
        region=region,
        correction=correction,
        rejected_N=rejected_N,
    )


def _penalties(
    tokens: Tokens, weights_N: torch.Tensor, config: AlgorithmConfig, entropy_coef: float
) -> dict[str, torch.Tensor]:
    penalties = {}
    logprobs_N, engine_N = tokens.logprobs_N, tokens.engine_logprobs_N
    if config.kl.kind in ("k2", "k3", "k3_plus"):
        assert tokens.reference_logprobs_N is not None
        penalty_N = kl_penalty(logprobs_N, tokens.reference_logprobs_N, engine_N, config.kl)
        penalties["kl"] = config.kl.coef * (weights_N * penalty_N).sum()
    if config.drift:
        penalties["drift"] = config.drift * (weights_N * drift_penalty(logprobs_N, engine_N)).sum()
    if config.entropy.kind != "none":
        assert tokens.entropy_N is not None
        penalties["entropy"] = -entropy_coef * (weights_N * tokens.entropy_N).sum()
    return penalties
