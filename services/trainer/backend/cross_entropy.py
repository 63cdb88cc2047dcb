"""Cross-entropy of given tokens: what supervised training learns, alone or beside reinforcement learning.

    cross-entropy = -(1 / learned tokens) * sum over them of log p(token | all before it)

at temperature 1, with every id of the vocabulary in the distribution: what `cross_entropy` of a plain forward pass
gives.
Legend: L = layers with experts, E = experts of a layer.

Invariant: the value and its gradient do not depend on how the rows are packed, up to the order of float32 sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Results of the pass over a batch of demonstrations, apart from its gradient."""

    value: float
    """Mean over the learned tokens, in nats."""
    entropy: float
    """Mean of the distributions that they are from, in nats."""
    num_learned: int
    """Learned tokens."""
    expert_counts_LE: torch.Tensor | None
    """Learned tokens that chose each expert; None for a dense model."""


def plan_demonstrations(
    sequences: Sequence[TrainSequence], config: BackendConfig, device: torch.device, ranks: Ranks, costs: RowCosts
) -> PlannedRows:
    """Plan rows of demonstrations, none of which shares its beginning with another."""
    numbers = range(len(sequences))
    return PlannedRows.of(sequences, numbers, numbers, numbers, config, device, ranks, costs)


def add_cross_entropy_gradient(
    model: Callable[[PackedRow], TokenLogprobs], rows: PlannedRows, *, coef: float = 1.0
) -> CrossEntropy:
    """Add `coef` times the gradient of the cross-entropy to that of the weights. All ranks must call it together.

    Args:
        model: With gradient, at temperature 1 and over the whole vocabulary.
        rows: All demonstrations of the step, at least one.
        coef: Factor of the gradient; the value that is returned is without it.
    """
    num_learned = sum(sequence.num_own_tokens for sequence in rows.sequences)
    computed: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    for number, row, counts in rows:
        said = model(row)
        value = -said.logprobs_N.sum() / num_learned
        if value.requires_grad:  # not where only the tower is trained, in a row without images
            (coef * value if counts else 0.0 * value).backward()
        if counts:
            computed.append((number, value.detach(), said.entropy_N.detach().double().sum(), said.expert_counts_LE))
    # Only now is a GPU waited for, when all rows are queued.
    of_rows = rows.ranks.in_order(
        [
            (number, (float(value), float(entropy), None if counts_LE is None else counts_LE.cpu()))
            for number, value, entropy, counts_LE in computed
        ]
    )
    counted = [counts_LE for _, _, counts_LE in of_rows if counts_LE is not None]
    return CrossEntropy(
        value=sum(value for value, _, _ in of_rows),
        entropy=sum(entropy for _, entropy, _ in of_rows) / num_learned,
        num_learned=num_learned,
        expert_counts_LE=torch.stack(counted).sum(0) if counted else None,
    )
