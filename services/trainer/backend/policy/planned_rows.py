"""Sequences packed into rows, each of which is built when its forward pass comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from services.trainer.batching.packing import Row, num_row_tokens, pack
from services.trainer.batching.rows import PackedRow, build_row, padded_length
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRows:
    """Rows of some sequences of a batch."""

    sequences: Sequence[TrainSequence]
    """Of all samples of the batch."""
    samples: Sequence[int]
    """The sample of each."""
    plan: Sequence[Row]
    row_length: int
    """To which rows are padded; 0 pads nothing."""
    device: torch.device

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        groups: Sequence[int],
        samples: Sequence[int],
        chosen: Sequence[int],
        config: BackendConfig,
        device: torch.device,
    ) -> Self:
        """Plan rows of the chosen sequences.

        Args:
            sequences: Of all samples of the batch.
            groups: The group of each.
            samples: The sample of each.
            chosen: Numbers of the sequences, with all of a sample or none.
            config: How they are packed.
            device: Where the rows are computed.
        """
        plan = pack(
            sequences,
            groups,
            chosen,
            max_tokens=config.micro_batch_tokens,
            share_prompts=config.share_prompts,
            fill=config.fixed_rows,
            samples=samples,
        )
        row_length = config.micro_batch_tokens if config.fixed_rows else 0
        return cls(sequences=sequences, samples=samples, plan=plan, row_length=row_length, device=device)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.plan)

    def __iter__(self) -> Iterator[PackedRow]:
        """Build one row after the other, on the device."""
        for row in self.plan:
            yield build_row(self.sequences, row, length=self.row_length, samples=self.samples).to(self.device)

    @property
    def token_counts(self) -> "TokenCounts":
        """What the rows cost."""
        lengths = [sequence.num_inputs for sequence in self.sequences]
        read = [num_row_tokens(row, lengths) for row in self.plan]
        computed = [padded_length(tokens, self.row_length) if self.row_length else tokens for tokens in read]
        return TokenCounts(
            planned=sum(lengths[number] for row in self.plan for block in row for number in block.sequences),
            read=sum(read),
            computed=sum(computed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of rows."""

    planned: int = 0
    """Of the sequences, each by itself."""
    read: int = 0
    """Of these, in the rows: what sequences of a group share stands there once."""
    computed: int = 0
    """Of the rows, with what pads them."""

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        """Count both."""
        return TokenCounts(
            planned=self.planned + other.planned, read=self.read + other.read, computed=self.computed + other.computed
        )

    @property
    def packing_density(self) -> float:
        """Share of the computed tokens that belong to samples; 1 unless rows are padded."""
        return self.read / max(1, self.computed)

    @property
    def shared_fraction(self) -> float:
        """Share of the samples' tokens that are not computed, because another sample begins with the same."""
        return 1 - self.read / max(1, self.planned)
