"""The term that demonstrations add to the loss of a step of reinforcement learning.

Invariant: `learn` adds its gradient once, and nothing scales it afterwards: it comes after the gradient of the groups
has its denominator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.trainer.backend.cross_entropy import add_cross_entropy_gradient, plan_demonstrations
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedDemonstrations:
    """Results of a step's demonstrations, apart from their gradient."""

    loss: float
    """Their part of the loss."""
    rows: PlannedRows
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationTerm:
    """`coef` times the cross-entropy of a step's demonstrations."""

    model: Callable[[PackedRow], TokenLogprobs]
    """With gradient, at temperature 1 and over all ids."""
    coef: float
    config: BackendConfig
    device: torch.device
    ranks: Ranks
    costs: RowCosts

    def learn(self, sequences: Sequence[TrainSequence]) -> LearnedDemonstrations:
        """Add the gradient of the term. All ranks must call it together."""
        rows = plan_demonstrations(sequences, self.config, self.device, self.ranks, self.costs)
        found = add_cross_entropy_gradient(self.model, rows, coef=self.coef)
        return LearnedDemonstrations(
            loss=self.coef * found.value,
            rows=rows,
            metrics={
                "ce_loss": self.coef * found.value,
                "demonstration_cross_entropy": found.value,
                "demonstration_entropy": found.entropy,
                "num_demonstrations": float(len(sequences)),
                "num_demonstration_tokens": float(found.num_learned),
            },
        )
