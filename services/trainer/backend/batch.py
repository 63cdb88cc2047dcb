"""An optimizer batch: its samples with advantages and weights, cut into micro-batches.

Legend: G = samples of the batch, N = the policy's own tokens of a micro-batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.tokens import Samples
from services.trainer.batching.micro_batch import MicroBatch, pad, plan_micro_batches
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """An optimizer batch. Micro-batches are made when they are asked for."""

    sequences: list[TrainSequence]
    """G: the sequence of each sample."""
    group_G: np.ndarray
    """Number of each sample's group."""
    num_tokens_G: np.ndarray
    samples: Samples
    has_advantage_G: np.ndarray
    """bool: the sample's tokens have an advantage."""
    plan: list[list[int]]
    """Numbers of the samples of each micro-batch. Samples of groups that cannot be trained are in none."""
    num_with_gradient: int
    """Micro-batches with a gradient; they come first."""
    device: torch.device

    @property
    def num_forward(self) -> int:
        """Tokens of all planned samples."""
        return sum(len(self.sequences[sample]) for samples in self.plan for sample in samples)

    @property
    def num_padded(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(len(samples) * max(len(self.sequences[sample]) for sample in samples) for samples in self.plan)

    def micro_batch(self, number: int) -> MicroBatch:
        """Make a micro-batch on the device."""
        samples = self.plan[number]
        return pad([self.sequences[sample] for sample in samples], samples).to(self.device)

    def has_gradient(self, number: int) -> bool:
        """Return whether a micro-batch has a gradient."""
        return number < self.num_with_gradient


def is_finite(group: TrainGroup) -> bool:
    """Return whether rewards and the engine's log-probabilities are numbers; NaN is a reward that was not judged."""
    logprobs = (sequence.engine_logprobs_X[sequence.loss_mask_X] for sequence in group.sequences)
    return not np.isinf(group.rewards).any() and all(np.isfinite(values).all() for values in logprobs)


def make_batch(
    groups: Sequence[TrainGroup],
    skipped: Collection[int],
    *,
    config: BackendConfig,
    algorithm: AlgorithmConfig,
    version: int,
    device: torch.device,
) -> Batch:
    """Return the batch of a step.

    Args:
        groups: In the order of the batch.
        skipped: Numbers of groups that cannot be trained. They count in every denominator.
        config: How samples are cut into micro-batches.
        algorithm: The axes.
        version: The published version.
        device: Where the loss is computed.

    Raises:
        DataError: the estimator of advantages cannot work with these rewards.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    group_G = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
    usable_G = ~np.isin(group_G, list(skipped))
    rewards_G = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
    rewards_G = np.where(usable_G, rewards_G, np.nan)
    num_tokens_G = np.array([sequence.num_own_tokens for sequence in sequences])
    has_token_rewards = algorithm.kl.kind == "k1_in_reward"
    advantages_G = sample_advantages(
        rewards_G, group_G, num_tokens_G, algorithm.advantage, is_whitened=not has_token_rewards
    )
    judged_G = ~np.isnan(rewards_G)
    has_advantage_G = judged_G if has_token_rewards else advantages_G != 0
    has_gradient_G = (has_advantage_G | algorithm.regularises) & usable_G
    with_gradient, without = (
        _plan(sequences, np.flatnonzero(chosen_G), config.micro_batch_tokens)
        for chosen_G in (has_gradient_G, ~has_gradient_G & usable_G)
    )
    return Batch(
        sequences=sequences,
        group_G=group_G,
        num_tokens_G=num_tokens_G,
        samples=Samples(
            advantages_G=torch.from_numpy(advantages_G).float().to(device),
            weights_G=torch.from_numpy(token_weights(num_tokens_G, group_G, algorithm.aggregation)).float().to(device),
            judged_G=torch.from_numpy(judged_G).to(device),
            version=version,
        ),
        has_advantage_G=has_advantage_G,
        plan=[*with_gradient, *without],
        num_with_gradient=len(with_gradient),
        device=device,
    )


def _plan(sequences: Sequence[TrainSequence], chosen: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Cut the chosen samples into micro-batches; see `plan_micro_batches`."""
    plan = plan_micro_batches([len(sequences[sample]) for sample in chosen], max_tokens)
    return [[int(chosen[number]) for number in numbers] for numbers in plan]
