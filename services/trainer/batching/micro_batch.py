"""Pads sequences into micro-batches.

Legend: B = rows of a micro-batch, T = its longest sequence, N = the policy's own tokens in it (row by row), I =
images in order of their placeholders, U = different images among them, P = patches of the different images, D =
values of a patch.

Padding is on the right, where causal attention from a real token never looks. The model computes positions per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from services.trainer.batching.sequences import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The input of one forward pass, and what the loss needs beside it."""

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    image_mask_BT: torch.Tensor
    """1 at placeholders: the `mm_token_type_ids` of transformers."""
    rows_N: torch.Tensor
    columns_N: torch.Tensor
    """Row and column of each of the policy's own tokens."""
    engine_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    sample_N: torch.Tensor
    """Number of the token's sample in the optimizer batch."""
    pixel_values_PD: torch.Tensor | None
    """None if no row has an image."""
    grid_thw_U3: torch.Tensor | None
    image_numbers_I: torch.Tensor | None
    """For each occurrence, its row in the different images."""

    @property
    def num_own_tokens(self) -> int:
        """N."""
        return len(self.rows_N)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in tensors.items() if t is not None})


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens`, padding included. Returns their numbers.

    Longest first, equal lengths in their own order: rows of similar length share a micro-batch, and the largest one
    comes first, so that a batch that does not fit into memory fails at once. A sequence longer than `max_tokens` is
    alone.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    plan: list[list[int]] = []
    for number in order:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(number)
        else:
            plan.append([number])
    return plan


def pad(sequences: Sequence[TrainSequence], samples: Sequence[int] | None = None) -> MicroBatch:
    """Pad sequences into one micro-batch. Each row is padded with its own first id, which is never a placeholder.

    Args:
        sequences: The rows.
        samples: Number of each row's sample in the optimizer batch; None counts from 0.
    """
    shape = (len(sequences), max(len(sequence) for sequence in sequences))
    input_ids_BT = np.empty(shape, dtype=np.int64)
    attention_mask_BT = np.zeros(shape, dtype=np.int64)
    image_mask_BT = np.zeros(shape, dtype=np.int64)
    own_BT = np.zeros(shape, dtype=bool)
    for row, sequence in enumerate(sequences):
        input_ids_BT[row] = sequence.token_ids_X[0]
        input_ids_BT[row, : len(sequence)] = sequence.token_ids_X
        attention_mask_BT[row, : len(sequence)] = 1
        image_mask_BT[row, : len(sequence)] = sequence.image_mask_X
        own_BT[row, : len(sequence)] = sequence.loss_mask_X
    rows_N, columns_N = np.nonzero(own_BT)

    images = [image for sequence in sequences for image in sequence.images]
    numbers: dict[int, int] = {}
    image_numbers = [numbers.setdefault(id(image), len(numbers)) for image in images]
    different = [images[image_numbers.index(number)] for number in range(len(numbers))]
    return MicroBatch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        attention_mask_BT=torch.from_numpy(attention_mask_BT),
        image_mask_BT=torch.from_numpy(image_mask_BT),
        rows_N=torch.from_numpy(rows_N),
        columns_N=torch.from_numpy(columns_N),
        engine_logprobs_N=torch.from_numpy(np.concatenate([s.engine_logprobs_X[s.loss_mask_X] for s in sequences])),
        versions_N=torch.from_numpy(np.concatenate([s.versions_X[s.loss_mask_X] for s in sequences])),
        sample_N=torch.from_numpy(rows_N if samples is None else np.asarray(samples, dtype=np.int64)[rows_N]),
        pixel_values_PD=torch.cat([image.pixel_values_PD for image in different]) if different else None,
        grid_thw_U3=torch.tensor([image.grid_thw for image in different]) if different else None,
        image_numbers_I=torch.tensor(image_numbers) if different else None,
    )
