"""Packs sequences into rows. The rank that computes a row also builds it, while the row before is computed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.ranks.rounds import dealt_rows, evened, rounds_of
from services.trainer.batching.packing import Row, num_row_tokens, pack
from services.trainer.batching.product_counts import ProductCounts, different_images
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.rows import PackedRow, build_row, fixed_length, padded_length
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import BackendConfig

_EQUAL = RowCosts()


class RankRow(NamedTuple):
    """A row that this rank computes."""

    number: int
    """Number of the row in the plan."""
    row: PackedRow
    counts: bool
    """Whether the row is this rank's, or its group's where ranks share rows. Others are computed only because all
    ranks compute the same number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRows:
    """Rows of some sequences of a batch."""

    sequences: Sequence[TrainSequence]
    """Sequences of all samples of the batch."""
    samples: Sequence[int]
    """Sample of each sequence."""
    plan: Sequence[Row]
    row_lengths: Sequence[int]
    """Length that each row of the plan is padded to; 0 pads nothing."""
    device: torch.device
    ranks: Ranks
    costs: RowCosts = _EQUAL
    with_experts: bool = False
    """Whether routers take the experts that the engine chose, where they are known."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        groups: Sequence[int],
        samples: Sequence[int],
        chosen: Sequence[int],
        config: BackendConfig,
        device: torch.device,
        ranks: Ranks = ALONE,
        costs: RowCosts = _EQUAL,
    ) -> Self:
        """Plan rows of the chosen sequences.

        Args:
            sequences: Sequences of all samples of the batch.
            groups: Group of each sequence.
            samples: Sample of each sequence.
            chosen: Numbers of the chosen sequences: all of a sample's or none.
            config: How they are packed.
            device: Device that computes the rows.
            ranks: The ranks that compute the rows.
            costs: By which several ranks get rows that take equally long.
        """
        lengths = [sequence.num_inputs for sequence in sequences]

        def plan(max_tokens: int) -> list[Row]:
            return pack(
                sequences,
                groups,
                chosen,
                max_tokens=max_tokens,
                share_prompts=config.share_prompts,
                fill=config.fixed_rows,
                samples=samples,
            )

        widest = plan(config.micro_batch_tokens)
        if ranks.num_row_groups > 1 and not config.fixed_rows:
            num_tokens = sum(num_row_tokens(row, lengths) for row in widest)
            widest = evened(
                ranks.num_row_groups, plan, widest, num_tokens=num_tokens, max_tokens=config.micro_batch_tokens
            )
        row_lengths = [0] * len(widest)
        if config.fixed_rows:
            sizes = [num_row_tokens(row, lengths) for row in widest]
            row_lengths = [fixed_length(size, config.micro_batch_tokens, config.row_lengths) for size in sizes]
        return cls(
            sequences=sequences,
            samples=samples,
            plan=widest,
            row_lengths=row_lengths,
            device=device,
            ranks=ranks,
            costs=costs,
            with_experts=config.router_replay,
        )

    def __iter__(self) -> Iterator[RankRow]:
        """Build the rows that this rank computes, each on the device; the next one is built while one is computed."""
        num_groups = self.ranks.num_row_groups
        costs = self._costs() if num_groups > 1 else [0.0] * len(self.plan)
        numbers = list(rounds_of(self.ranks.row_group, costs, num_groups))
        following = self._begin(numbers[0][0]) if numbers else None
        for place, (number, counts) in enumerate(numbers, 1):
            assert following is not None
            row = following.result()
            following = self._begin(numbers[place][0]) if place < len(numbers) else None
            yield RankRow(number, row.to(self.device), counts)

    def _begin(self, number: int) -> Future[PackedRow]:
        """Build a row in a thread of its own, which ends with it, whether anybody takes the row or not."""
        builder = ThreadPoolExecutor(1, thread_name_prefix="row")
        row = builder.submit(self._built, number)
        builder.shutdown(wait=False)
        return row

    def _built(self, number: int) -> PackedRow:
        """Return a row on the host."""
        row = build_row(
            self.sequences,
            self.plan[number],
            length=self.row_lengths[number],
            samples=self.samples,
            with_experts=self.with_experts,
        )
        return row.pinned() if self.device.type == "cuda" else row

    @property
    def num_of_rank(self) -> int:
        """Number of rows that this rank computes; it is the same for all ranks."""
        return -(-len(self.plan) // self.ranks.num_row_groups)

    @property
    def have_images(self) -> bool:
        """Whether any rank's rows have images."""
        return any(self.sequences[number].images for row in self.plan for block in row for number in block.sequences)

    def _costs(self) -> list[float]:
        lengths = [sequence.num_inputs for sequence in self.sequences]
        return [self.costs.of(row, lengths, self._num_patches(row)) for row in self.plan]

    def _num_patches(self, row: Row) -> int:
        return sum(len(image.pixel_values_PD) for image in different_images(row, self.sequences))

    @property
    def group_costs(self) -> list[float]:
        """Cost of the rows of each rank, or of each group of ranks that share rows. The first is the highest: the cost
        of the costliest rows of all rounds, for which the others wait.
        """
        costs, num_groups = self._costs(), self.ranks.num_row_groups
        dealt = dealt_rows(costs)
        return [sum(costs[row] for row in dealt[group::num_groups]) for group in range(num_groups)]

    @property
    def product_counts(self) -> ProductCounts:
        """What the products of the rows are over."""
        return ProductCounts.of(self.plan, self.sequences)

    @property
    def token_counts(self) -> "TokenCounts":
        """Token counts of the rows."""
        lengths = [sequence.num_inputs for sequence in self.sequences]
        read = [num_row_tokens(row, lengths) for row in self.plan]
        padded = zip(read, self.row_lengths, strict=True)
        computed = [padded_length(tokens, length) if length else tokens for tokens, length in padded]
        numbers = [number for row in self.plan for block in row for number in block.sequences]
        return TokenCounts(
            planned=sum(lengths[number] for number in numbers),
            read=sum(read),
            computed=sum(computed),
            replayed=sum(self.sequences[number].num_routed for number in numbers) if self.with_experts else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Token counts of rows."""

    planned: int = 0
    """Tokens of the sequences, each on its own."""
    read: int = 0
    """Tokens of the sequences in the rows, which hold a group's shared prefix once."""
    computed: int = 0
    """Tokens of the rows, padding included."""
    replayed: int = 0
    """Of the tokens planned, those that go through the experts that the engine chose."""

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        """Return the sum of both."""
        return TokenCounts(
            planned=self.planned + other.planned,
            read=self.read + other.read,
            computed=self.computed + other.computed,
            replayed=self.replayed + other.replayed,
        )

    @property
    def packing_density(self) -> float:
        """Share of the computed tokens that belong to samples; 1 unless rows are padded."""
        return self.read / max(1, self.computed)

    @property
    def shared_fraction(self) -> float:
        """Share of the samples' tokens that are not computed, because another sample begins with the same tokens."""
        return 1 - self.read / self.planned if self.planned else 0.0

    @property
    def replayed_fraction(self) -> float:
        """Share of the samples' tokens that go through the experts that the engine chose."""
        return self.replayed / max(1, self.planned)
