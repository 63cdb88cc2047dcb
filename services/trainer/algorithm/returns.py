"""Token advantages: a sample's reward minus its tokens' KL penalties against the reference, whitened.

Legend: N = own tokens.
"""

import torch

from services.trainer.algorithm.axes import KlConfig
from services.trainer.algorithm.tokens import Samples, Tokens, sample_sums


def token_returns(tokens: Tokens, samples: Samples, config: KlConfig) -> torch.Tensor:
    """Return float64[N]: at each token, the sample's reward minus coef * k1 of it and of all tokens after it.

    k1 = logp - reference, without gradient. The reward is given at the last token, and nothing is discounted
    (Hu et al. 2025, "REINFORCE++", with gamma = 1). All tokens of a sample must be present, in order.
    """
    assert tokens.reference_logprobs_N is not None
    cost_N = config.coef * (tokens.logprobs_N.detach() - tokens.reference_logprobs_N).double()
    return samples.advantages_G[tokens.sample_N].double() - _sums_from_here_on(cost_N, tokens.sample_N)


def token_advantages(tokens: Tokens, samples: Samples, config: KlConfig, *, mean: float, std: float) -> torch.Tensor:
    """Return [N]: the advantage of each token's sample, or its own whitened return with k1_in_reward.

    Args:
        tokens: Tokens of a micro-batch.
        samples: Samples of the optimizer batch.
        config: Whether tokens have their own rewards.
        mean: Mean return of the batch.
        std: Standard deviation of the batch's returns; 0 if they are all equal.
    """
    if config.kind != "k1_in_reward":
        return samples.advantages_G[tokens.sample_N]
    if not std:
        return torch.zeros_like(tokens.engine_logprobs_N)
    advantages_N = (token_returns(tokens, samples, config) - mean) / std * samples.eligible_G[tokens.sample_N]
    return advantages_N.to(tokens.engine_logprobs_N.dtype)


def _sums_from_here_on(values_N: torch.Tensor, sample_N: torch.Tensor) -> torch.Tensor:
    order_N = sample_N.argsort(stable=True)
    sorted_N, sample_N = values_N[order_N], sample_N[order_N]
    before_N = sorted_N.cumsum(0) - sorted_N  # over the samples before its own, too
    is_first_N = torch.ones_like(sample_N, dtype=torch.bool)
    is_first_N[1:] = sample_N[1:] != sample_N[:-1]
    before_sample_N = before_N[is_first_N][is_first_N.cumsum(0) - 1]
    sums_N = torch.empty_like(values_N)
    sums_N[order_N] = sample_sums(sorted_N, sample_N) - (before_N - before_sample_N)
    return sums_N
