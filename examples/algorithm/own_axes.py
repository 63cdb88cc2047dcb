"""An advantage and a trust region of your own: GMPO and OPO, which Penstock does not have.

The module must be importable where the trainer starts:

    PYTHONPATH=examples/algorithm penstock train tiny-cpu examples/algorithm/recipe.toml
"""

import numpy as np
import torch

from services.trainer.algorithm.tokens import sample_means
from services.trainer.algorithm.trust_region import Step, Surrogate


def gmpo(step: Step, low: float, high: float) -> Surrogate:
    """A times the geometric mean of a sample's clipped ratios (Zhao et al. 2025, "GMPO", arXiv 2507.20673, eq. 4).

    Each token's log ratio d is clipped to -low..high where that makes the objective smaller. In value, every token of a
    sample has the sample's objective; its gradient is that of its own log-probability. The mean over the sample's
    tokens, which aggregation "sequence" takes, then has the gradient of the paper's objective.

    Args:
        step: Tokens of whole samples: log-probabilities, anchor, advantages and the sample of each.
        low: How far a log ratio may fall.
        high: How far a log ratio may rise.
    """
    log_ratio_N = step.logprobs_N - step.anchor_N
    clipped_N = log_ratio_N.clamp(-low, high)
    smaller = torch.where(step.advantages_N > 0, log_ratio_N.minimum(clipped_N), log_ratio_N.maximum(clipped_N))
    mean_N = sample_means(smaller.detach(), step.sample_N).to(smaller.dtype)
    outside_N = smaller.detach() != log_ratio_N.detach()
    return Surrogate(
        objective_N=step.advantages_N * (smaller - smaller.detach() + mean_N).exp(),
        bounded_N=outside_N,
        outside_N=outside_N,
    )


def nothing(rewards_G: np.ndarray, group_G: np.ndarray, num_tokens_G: np.ndarray) -> np.ndarray:
    """0 for every sample: rewards are measured and teach nothing, as in on-policy distillation from a teacher.

    Args:
        rewards_G: Of the judged samples of the batch.
        group_G: Group of each.
        num_tokens_G: The policy's own tokens of each.
    """
    return np.zeros_like(rewards_G)


def opo(rewards_G: np.ndarray, group_G: np.ndarray, num_tokens_G: np.ndarray) -> np.ndarray:
    """Reward minus the group's mean weighted by length (Hao et al. 2025, "OPO", arXiv 2505.23585).

    Args:
        rewards_G: Of the judged samples of the batch.
        group_G: Group of each.
        num_tokens_G: The policy's own tokens of each.
    """
    advantages_G = np.zeros_like(rewards_G)
    for group in np.unique(group_G):
        members = group_G == group
        rewards = rewards_G[members]
        if rewards.max() > rewards.min():  # equal rewards teach exactly nothing
            advantages_G[members] = rewards - np.average(rewards, weights=num_tokens_G[members])
    return advantages_G
