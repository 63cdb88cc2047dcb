"""An optimizer batch: its samples with advantages and weights, packed into rows.

Legend: G = samples of the batch.

Samples without gradient are computed for metrics only, and then one in `MEASURED_EVERY`; each that is computed stands
for its share of the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.statistics import needs_statistics
from services.trainer.algorithm.tokens import Samples
from services.trainer.batching.packing import Row, num_row_tokens, pack
from services.trainer.batching.rows import PackedRow, build_row, padded_length
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig

MEASURED_EVERY = 8
"""Of the samples without gradient, one in this many is computed: enough to see trainer and engine drift apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """An optimizer batch. Rows are built when they are asked for."""

    sequences: list[TrainSequence]
    """G: the sequence of each sample."""
    group_G: np.ndarray
    """Number of each sample's group."""
    num_tokens_G: np.ndarray
    samples: Samples
    has_advantage_G: np.ndarray
    """bool: the sample's tokens have an advantage."""
    plan: list[Row]
    """Samples of groups that cannot be trained, and most of those without gradient, are in none."""
    num_with_gradient: int
    """Rows with a gradient; they come first."""
    row_length: int
    """To which rows are padded; 0 pads nothing."""
    counts_G: torch.Tensor
    """float64 on the CPU: how many samples each stands for in metrics; more than 1 where only some of those without
    gradient are computed."""
    device: torch.device

    @property
    def packing_density(self) -> float:
        """Share of the computed tokens that belong to samples; 1 unless rows are padded."""
        read = [num_row_tokens(row, self._num_inputs) for row in self.plan]
        computed = [padded_length(tokens, self.row_length) if self.row_length else tokens for tokens in read]
        return sum(read) / max(1, sum(computed))

    @property
    def shared_token_fraction(self) -> float:
        """Share of the planned samples' tokens that are not computed, because another sample begins with the same."""
        read = sum(num_row_tokens(row, self._num_inputs) for row in self.plan)
        planned = sum(self._num_inputs[number] for row in self.plan for block in row for number in block.samples)
        return 1 - read / max(1, planned)

    def row(self, number: int) -> PackedRow:
        """Build a row on the device."""
        return build_row(self.sequences, self.plan[number], length=self.row_length).to(self.device)

    def has_gradient(self, number: int) -> bool:
        """Return whether a row has a gradient."""
        return number < self.num_with_gradient

    @property
    def _num_inputs(self) -> list[int]:
        return [sequence.num_inputs for sequence in self.sequences]


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
        config: How samples are packed into rows.
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
    masked_G = np.array([masked for group in groups for masked in group.masked or [False] * len(group.sequences)])
    advantages_G = np.where(masked_G, 0.0, advantages_G)
    weights_G = np.where(masked_G, 0.0, token_weights(num_tokens_G, group_G, algorithm.aggregation))
    judged_G = ~np.isnan(rewards_G) & ~masked_G
    has_advantage_G = judged_G if has_token_rewards else advantages_G != 0
    has_gradient_G = (has_advantage_G | algorithm.regularises) & usable_G & ~masked_G
    without = np.flatnonzero(~has_gradient_G & usable_G).tolist()
    counts_G = np.ones(len(sequences))
    if without and not needs_statistics(algorithm):
        measured = measured_samples(without, version)
        counts_G[measured] = len(without) / len(measured)
        without = measured
    with_gradient, without_gradient = (
        pack(
            sequences,
            group_G.tolist(),
            chosen,
            max_tokens=config.micro_batch_tokens,
            share_prompts=config.share_prompts,
            fill=config.fixed_rows,
        )
        for chosen in (np.flatnonzero(has_gradient_G).tolist(), without)
    )
    return Batch(
        sequences=sequences,
        group_G=group_G,
        num_tokens_G=num_tokens_G,
        samples=Samples(
            advantages_G=torch.from_numpy(advantages_G).float().to(device),
            weights_G=torch.from_numpy(weights_G).float().to(device),
            judged_G=torch.from_numpy(judged_G).to(device),
            version=version,
        ),
        has_advantage_G=has_advantage_G,
        plan=[*with_gradient, *without_gradient],
        num_with_gradient=len(with_gradient),
        row_length=config.micro_batch_tokens if config.fixed_rows else 0,
        counts_G=torch.from_numpy(counts_G),
        device=device,
    )


def measured_samples(flat: Sequence[int], version: int) -> list[int]:
    """Return which samples without gradient are computed: at least one, others at every version, the same in a replay.

    Args:
        flat: Numbers of the samples without gradient.
        version: The published version.
    """
    first = version % min(MEASURED_EVERY, max(1, len(flat)))
    return list(flat[first::MEASURED_EVERY])
