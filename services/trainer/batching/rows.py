"""Builds packed rows: the input of one forward pass, and the loss's inputs for its tokens.

Legend: T = tokens of a row, A = the four axes of positions, N = the policy's own tokens of its samples, I = images in
order of their placeholders, J = all images' placeholders, U = different images among them, P = patches of the different
images, D = values of a patch, R = tokens of a sample whose experts are known, L = layers, K = experts of a token.

A row is a list of segments. A segment's tokens attend to the tokens before them in the segment, and to the whole prefix
segment if there is one: a row holds a group's prompt once, and each response is a segment with the prompt as its
prefix. Nothing else is visible, and positions continue where the prefix stops, so each response is computed as if it
stood alone after its prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from services.trainer.batching.images import ImagePatches
from services.trainer.batching.packing import Block, Row
from services.trainer.batching.positions import NUM_AXES, sample_positions
from services.trainer.batching.sequences import TrainSequence
from services.trainer.batching.to_device import to_device

ROW_MULTIPLE = 64
"""Rows of a fixed length are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens of a row that belong together, as ranges of the row."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0
    """End of the prefix's range, which is empty if there is no prefix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """A row of consecutive samples: a micro-batch."""

    input_ids_T: torch.Tensor
    positions_AT: torch.Tensor
    """Positions from `sample_positions`, sample by sample."""
    segments: tuple[Segment, ...]
    """Segments that cover the row, in order."""
    predict_N: torch.Tensor
    """The row's token whose hidden state predicts the own token: in a group, responses share the prompt's last."""
    targets_N: torch.Tensor
    """The policy's own tokens, sample by sample."""
    sample_N: torch.Tensor
    """Number of each token's sample in the optimizer batch; a sample's tokens are adjacent, sequence by sequence."""
    engine_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    pixel_values_PD: torch.Tensor | None
    """Patches of the different images; None if the row has no image."""
    grid_thw_U3: torch.Tensor | None
    """Sizes of the different images in patches; always on the host, which derives more of the tower's inputs."""
    image_numbers_I: tuple[int, ...]
    """Index into the different images, for each occurrence of an image."""
    image_tokens_J: torch.Tensor | None
    """The row's token of each placeholder; None if the row has no image."""
    num_padded: int
    """Padding tokens at the row's end; they are a segment of their own."""
    routed_experts_TLK: torch.Tensor | None = None
    """int16: experts that the engine chose for each token, which routers are to take; -1 where they are not known, so
    that routers choose. None: routers choose for all tokens."""

    @property
    def num_own_tokens(self) -> int:
        """N: the policy's own tokens of the row."""
        return len(self.predict_N)

    @property
    def num_tokens(self) -> int:
        """T without padding."""
        return len(self.input_ids_T) - self.num_padded

    def to(self, device: torch.device) -> "PackedRow":
        """Return a copy on `device`, which a GPU makes by itself; the images' sizes stay on the host."""
        return self._with_each(lambda tensor: to_device(tensor, device))

    def pinned(self) -> "PackedRow":
        """Return a copy in memory of the host from which a GPU copies by itself."""
        return self._with_each(torch.Tensor.pin_memory)

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedRow":
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        tensors.pop("grid_thw_U3", None)
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def build_row(
    sequences: Sequence[TrainSequence],
    row: Row,
    *,
    length: int = 0,
    samples: Sequence[int] | None = None,
    with_experts: bool = False,
) -> PackedRow:
    """Build a row of the plan.

    Args:
        sequences: All sequences of the optimizer batch, by number.
        row: From `plan_rows`.
        length: Pad the row to this length, and then to a multiple of `ROW_MULTIPLE`; 0 pads nothing.
        samples: Sample of each sequence; None: each sequence is a sample.
        with_experts: Give the row the experts that the engine recorded; sequences that share a prefix have the same
            there (`shared_experts`).
    """
    builder = _RowBuilder(range(len(sequences)) if samples is None else samples)
    for block in row:
        builder.add(sequences, block)
    if length:
        builder.pad(length)
    return builder.build(with_experts=with_experts)


def fixed_length(num_tokens: int, longest: int, num_lengths: int) -> int:
    """Return the least of `num_lengths` even steps up to `longest` that holds a row, or `longest` if none does."""
    step = -(-longest // num_lengths)
    return min(longest, -(-num_tokens // step) * step)


def padded_length(num_tokens: int, length: int) -> int:
    """Return the length of a row that is padded to `length`, and then to a multiple of `ROW_MULTIPLE`."""
    return -(-max(length, num_tokens) // ROW_MULTIPLE) * ROW_MULTIPLE


class _RowBuilder:
    """Builds a row from consecutive blocks."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._length = 0
        self._segments: list[Segment] = []
        self._ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._own: dict[str, list[np.ndarray]] = {
            name: [] for name in ("predict", "targets", "sample", "engine_logprobs", "versions")
        }
        self._images: list[ImagePatches] = []
        self._image_tokens: list[np.ndarray] = []
        self._experts: list[tuple[int, np.ndarray]] = []
        """The first token of a run in the row, and the experts of its tokens."""
        self._num_padded = 0

    def add(self, sequences: Sequence[TrainSequence], block: Block) -> None:
        """Append the block's prefix, then the rest of each of its sequences."""
        prefix = block.prefix_length
        positions = {number: _positions(sequences[number]) for number in block.sequences}
        first = block.sequences[0]
        prefix_start, prefix_stop = self._append(sequences[first], positions[first], 0, prefix, 0, 0)
        self._add_experts(sequences[first], 0, prefix, prefix_start)
        for number in block.sequences:
            sequence = sequences[number]
            start, _ = self._append(sequence, positions[number], prefix, sequence.num_inputs, prefix_start, prefix_stop)
            self._add_experts(sequence, prefix, sequence.num_inputs, start)
            own = np.flatnonzero(sequence.loss_mask_X)
            read = own - 1
            self._own["predict"].append(np.where(read < prefix, prefix_start + read, start + read - prefix))
            self._own["targets"].append(sequence.token_ids_X[own])
            self._own["sample"].append(np.full(len(own), self._samples[number], dtype=np.int64))
            self._own["engine_logprobs"].append(sequence.engine_logprobs_X[own])
            self._own["versions"].append(sequence.versions_X[own])

    def pad(self, length: int) -> None:
        """Append a segment without own tokens. It repeats the row's first id, which is never a placeholder."""
        target = padded_length(self._length, length)
        self._num_padded = target - self._length
        if self._num_padded:
            self._segments.append(Segment(start=self._length, stop=target))
            self._ids.append(np.repeat(self._ids[0][:1], self._num_padded))
            self._positions.append(np.tile(np.arange(self._num_padded), (NUM_AXES, 1)))

    def build(self, *, with_experts: bool) -> PackedRow:
        """Return the row."""
        numbers: dict[int, int] = {}
        image_numbers = tuple(numbers.setdefault(id(image), len(numbers)) for image in self._images)
        different = [self._images[image_numbers.index(number)] for number in range(len(numbers))]
        return PackedRow(
            input_ids_T=torch.from_numpy(np.concatenate(self._ids)),
            positions_AT=torch.from_numpy(np.concatenate(self._positions, axis=1)),
            segments=tuple(self._segments),
            **{f"{name}_N": torch.from_numpy(np.concatenate(parts)) for name, parts in self._own.items()},
            pixel_values_PD=torch.cat([image.pixel_values_PD for image in different]) if different else None,
            grid_thw_U3=torch.tensor([image.grid_thw for image in different]) if different else None,
            image_numbers_I=image_numbers,
            image_tokens_J=torch.from_numpy(np.concatenate(self._image_tokens)) if different else None,
            num_padded=self._num_padded,
            routed_experts_TLK=self._experts_of_row() if with_experts and self._experts else None,
        )

    def _experts_of_row(self) -> torch.Tensor:
        """Return int16[T, L, K] of all tokens."""
        _, of_first = self._experts[0]
        num_tokens = self._length + self._num_padded
        experts_TLK = np.full((num_tokens, *of_first.shape[1:]), -1, dtype=np.int16)
        for start, experts_RLK in self._experts:
            experts_TLK[start : start + len(experts_RLK)] = experts_RLK
        return torch.from_numpy(experts_TLK)

    def _add_experts(self, sequence: TrainSequence, begin: int, end: int, start: int) -> None:
        """Note which experts are known of a sequence's tokens [begin, end), the first of which is the row's `start`."""
        if sequence.routed_experts_RLK is not None and begin < min(end, sequence.num_routed):
            self._experts.append((start, sequence.routed_experts_RLK[begin:end]))

    def _append(
        self,
        sequence: TrainSequence,
        positions_AX: np.ndarray,
        begin: int,
        end: int,
        prefix_start: int,
        prefix_stop: int,
    ) -> tuple[int, int]:
        """Append tokens [begin, end) of a sample as a segment, if there are any, and return its range in the row."""
        start = self._length
        if begin < end:
            self._length = start + end - begin
            self._segments.append(
                Segment(start=start, stop=self._length, prefix_start=prefix_start, prefix_stop=prefix_stop)
            )
            self._ids.append(sequence.token_ids_X[begin:end])
            self._positions.append(positions_AX[:, begin:end])
            shown = zip(sequence.image_starts, sequence.images, strict=True)
            self._images += [image for image_start, image in shown if begin <= image_start < end]
            self._image_tokens.append(start + np.flatnonzero(sequence.image_mask_X[begin:end]))
        return start, self._length


def _positions(sequence: TrainSequence) -> np.ndarray:
    return sample_positions(
        sequence.image_mask_X,
        [image.grid_thw for image in sequence.images],
        [image.num_placeholders for image in sequence.images],
    )
