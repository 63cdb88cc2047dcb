"""Groups that are trained together: their samples with advantages and weights.

Legend: G = samples of the groups, S = their sequences.

Samples without gradient are computed for metrics only, and then one in `MEASURED_EVERY`; each that is computed stands
for its share of the others. With `correction.normalize` the loss depends on them, and all are computed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import batch_denominator, token_weights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.tokens import Samples
from services.trainer.batching.sequences import TrainGroup, TrainSequence

MEASURED_EVERY = 8
"""One in this many samples without gradient is computed: enough to see trainer and engine drift apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The groups of an optimizer batch, or the part of them that is there."""

    sequences: list[TrainSequence]
    """S: of all samples, sample by sample."""
    sample_S: np.ndarray
    """Number of each sequence's sample."""
    group_G: np.ndarray
    """Number of each sample's group."""
    num_tokens_G: np.ndarray
    denominator: float
    """Denominator of the weights of these groups' tokens (`aggregation.batch_denominator`)."""
    samples: Samples
    has_advantage_G: np.ndarray
    """bool: the sample's tokens have an advantage."""
    with_gradient: list[int]
    """Numbers of the samples that have a gradient."""
    without_gradient: list[int]
    """Numbers of those that have none, although their group can be trained; in order of the groups' indices, so that
    it does not depend on the order of the groups."""


def is_finite(group: TrainGroup) -> bool:
    """Return whether rewards and the engine's log-probabilities are numbers; NaN is a reward that was not judged."""
    logprobs = (sequence.engine_logprobs_X[sequence.loss_mask_X] for sequence in group.sequences)
    return not np.isinf(group.rewards).any() and all(np.isfinite(values).all() for values in logprobs)


def make_batch(
    groups: Sequence[TrainGroup],
    skipped: Collection[int],
    *,
    algorithm: AlgorithmConfig,
    entropy_coef: float,
    version: int,
    device: torch.device,
    denominator: float | None = None,
) -> Batch:
    """Return the batch of a step, or a part of it.

    Args:
        groups: In their order.
        skipped: Numbers of groups that cannot be trained. They count in every denominator.
        algorithm: The axes.
        entropy_coef: The step's factor of the entropy bonus, which gives every token a gradient if it is above 0.
        version: The published version.
        device: Where the loss is computed.
        denominator: Of the weights of tokens; None: that of these groups.

    Raises:
        DataError: the estimator of advantages cannot work with these rewards.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    num_samples = [len(group.samples) for group in groups]
    sample_S = np.repeat(np.arange(sum(num_samples)), [len(sample) for group in groups for sample in group.samples])
    group_G = np.repeat(np.arange(len(groups)), num_samples)
    usable_G = ~np.isin(group_G, list(skipped))
    rewards_G = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
    rewards_G = np.where(usable_G, rewards_G, np.nan)
    num_tokens_G = np.zeros(len(group_G), dtype=np.int64)
    np.add.at(num_tokens_G, sample_S, [sequence.num_own_tokens for sequence in sequences])
    has_token_rewards = algorithm.kl.kind == "k1_in_reward"
    masked_G = np.array([masked for group in groups for masked in group.masked or [False] * len(group.samples)])
    advantages_G = sample_advantages(
        rewards_G,
        group_G,
        num_tokens_G,
        algorithm.advantage,
        masked_G=masked_G,
        is_whitened=not has_token_rewards,
    )
    weights_G = token_weights(num_tokens_G, group_G, algorithm.aggregation, denominator=denominator)
    weights_G = np.where(masked_G, 0.0, weights_G)
    eligible_G = ~np.isnan(rewards_G) & ~masked_G
    has_advantage_G = eligible_G if has_token_rewards else advantages_G != 0
    regularises = algorithm.regularises or entropy_coef > 0
    has_gradient_G = (has_advantage_G | regularises) & usable_G & ~masked_G
    index_G = np.repeat([group.index for group in groups], num_samples)
    without_gradient = np.flatnonzero(~has_gradient_G & usable_G)
    return Batch(
        sequences=sequences,
        sample_S=sample_S,
        group_G=group_G,
        num_tokens_G=num_tokens_G,
        denominator=batch_denominator(num_tokens_G, group_G, algorithm.aggregation),
        samples=Samples(
            advantages_G=torch.from_numpy(advantages_G).float().to(device),
            weights_G=torch.from_numpy(weights_G).float().to(device),
            eligible_G=torch.from_numpy(eligible_G).to(device),
            version=version,
        ),
        has_advantage_G=has_advantage_G,
        with_gradient=np.flatnonzero(has_gradient_G).tolist(),
        without_gradient=without_gradient[np.argsort(index_G[without_gradient], kind="stable")].tolist(),
    )


def measured_samples(flat: Sequence[int], version: int) -> list[int]:
    """Return which samples without gradient are computed: at least one, others at every version, the same in a replay.

    Args:
        flat: Numbers of the samples without gradient of the whole batch.
        version: The published version.
    """
    first = version % min(MEASURED_EVERY, max(1, len(flat)))
    return list(flat[first::MEASURED_EVERY])
