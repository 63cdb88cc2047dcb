"""Forward and backward passes over rows of a batch's groups.

Legend: N = the policy's own tokens of a row, L = layers with experts, E = experts of a layer.

All ranks call each method together. Each computes its own rows and gets what the others computed, so all return the
same; only the gradient stays on each rank's own weights, until `ranks.sharding` sums it.

Results stay on the device until the last row is queued. If they were read row by row, a GPU would wait for the host
after each row, and the next row's work would be queued late. So a log-probability that is not finite has gone through
the loss, and into the gradient, before it is noticed; what calls this then forgets the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.statistics import BatchStatistics
from services.trainer.algorithm.tokens import Samples, Tokens
from services.trainer.backend.batch import Batch
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.policy.reference import ReferencePolicy
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.rows import PackedRow
from services.trainer.config import BackendConfig


class NotFiniteError(Exception):
    """The policy or the reference gives samples a log-probability that is not finite."""

    def __init__(self, samples: set[int]) -> None:
        """Of the samples with these numbers in the batch."""
        super().__init__(samples)
        self.samples = samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedRow:
    """What is kept of a row after its pass."""

    tokens: Tokens
    """Detached, with their samples' numbers in the batch."""
    expert_counts_LE: torch.Tensor | None
    """Tokens that chose each expert, on the host; None for a dense model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPass:
    """Rows to compute, of some samples of a chunk."""

    rows: PlannedRows
    samples: Samples
    """Samples of the chunk."""
    references: Sequence[torch.Tensor | None]
    """The reference policy's log-probabilities in each row that this rank computes."""
    first_sample: int
    """Number in the batch of the chunk's first sample."""


class _PassedRow(NamedTuple):
    """What a forward pass gave, on the device."""

    tokens: Tokens
    expert_counts_LE: torch.Tensor | None

    def without_gradient(self) -> Self:
        """Return the same without what the backward pass needs."""
        entropy_N = self.tokens.entropy_N
        tokens = replace(
            self.tokens,
            logprobs_N=self.tokens.logprobs_N.detach(),
            entropy_N=None if entropy_N is None else entropy_N.detach(),
        )
        return self._replace(tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPasses:
    """Plans and computes the rows."""

    model: Callable[[PackedRow], TokenLogprobs]
    """With gradient."""
    forget_forward: Callable[[], None]
    """To be called after forward passes that no backward pass followed."""
    ranks: Ranks
    costs: RowCosts
    """By which ranks get rows that take equally long."""
    reference: ReferencePolicy | None
    """Reference policy of the loss; None if the loss needs none."""
    device: torch.device
    config: BackendConfig
    algorithm: AlgorithmConfig

    def plan(self, batch: Batch, chosen: Sequence[int], first_sample: int) -> PlannedPass:
        """Plan the rows of chosen samples of a chunk, whose first sample has this number in the batch."""
        rows = PlannedRows.of(
            batch.sequences,
            batch.group_G[batch.sample_S].tolist(),
            batch.sample_S.tolist(),
            [sequence for sample in chosen for sequence in np.flatnonzero(batch.sample_S == sample).tolist()],
            self.config,
            self.device,
            self.ranks,
            self.costs,
        )
        references: list[torch.Tensor | None] = [None] * rows.num_of_rank
        if self.reference is not None:
            references = [*self.reference.logprobs(each.row for each in rows)]
        return PlannedPass(rows=rows, samples=batch.samples, references=references, first_sample=first_sample)

    def add_gradient(
        self, planned: PlannedPass, statistics: BatchStatistics, *, entropy_coef: float
    ) -> list[tuple[float, ComputedRow]]:
        """Add the rows' gradient to the weights', and return each row with its loss, in the order of the plan.

        Raises:
            NotFiniteError: log-probabilities of some samples are not finite; the gradient is then of no use.
        """
        computed: list[tuple[int, torch.Tensor, _PassedRow]] = []
        for (number, row, counts), reference_N in zip(planned.rows, planned.references, strict=True):
            passed = self._forward(row, reference_N)
            value = policy_loss(
                passed.tokens, planned.samples, self.algorithm, statistics=statistics, entropy_coef=entropy_coef
            ).value
            if self.ranks.size > 1:  # all ranks go backward as often, through all layers
                (value * float(counts) + 0.0 * passed.tokens.logprobs_N.sum()).backward()
            elif value.requires_grad:
                value.backward()
            if counts:
                computed.append((number, value.detach(), passed.without_gradient()))
        kept = self._kept([passed for _, _, passed in computed], planned.first_sample)
        return self.ranks.in_order(
            [(number, (float(value), each)) for (number, value, _), each in zip(computed, kept, strict=True)]
        )

    def measure(self, planned: PlannedPass) -> list[ComputedRow]:
        """Compute the rows without gradient, and return them in the order of the plan.

        Raises:
            NotFiniteError: log-probabilities of some samples are not finite.
        """
        computed: list[tuple[int, _PassedRow]] = []
        with torch.no_grad():
            for (number, row, counts), reference_N in zip(planned.rows, planned.references, strict=True):
                passed = self._forward(row, reference_N)
                if counts:
                    computed.append((number, passed))
        self.forget_forward()
        kept = self._kept([passed for _, passed in computed], planned.first_sample)
        return self.ranks.in_order([(number, each) for (number, _), each in zip(computed, kept, strict=True)])

    def _forward(self, row: PackedRow, reference_N: torch.Tensor | None) -> _PassedRow:
        output = self.model(row)
        tokens = Tokens(
            logprobs_N=output.logprobs_N,
            engine_logprobs_N=row.engine_logprobs_N,
            versions_N=row.versions_N,
            sample_N=row.sample_N,
            entropy_N=output.entropy_N,
            reference_logprobs_N=reference_N,
        )
        return _PassedRow(tokens, output.expert_counts_LE)

    def _kept(self, passed: Sequence[_PassedRow], first_sample: int) -> list[ComputedRow]:
        """Return what is kept of the rows of a chunk, given the number in the batch of its first sample. Waits for
        the device.
        """
        kept: list[ComputedRow] = []
        not_finite: set[int] = set()
        for tokens, expert_counts_LE in passed:
            tokens = tokens.detached()
            tokens = replace(tokens, sample_N=tokens.sample_N + first_sample)
            is_finite_N = tokens.logprobs_N.isfinite()
            if tokens.reference_logprobs_N is not None:
                is_finite_N &= tokens.reference_logprobs_N.isfinite()
            not_finite |= set(tokens.sample_N[~is_finite_N].tolist())
            counts_LE = None if expert_counts_LE is None else expert_counts_LE.cpu()
            kept.append(ComputedRow(tokens=tokens, expert_counts_LE=counts_LE))
        if not_finite := not_finite.union(*self.ranks.gather(not_finite)):
            raise NotFiniteError(not_finite)
        return kept
