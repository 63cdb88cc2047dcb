"""A row's segments as padded batches, for layers that read a segment token by token and carry a state from one token to
the next.

Segments without a prefix come first: the states that they end with are those that the others begin with. Segments of
similar length share a batch, so that padding is less than half of it.

Legend: S = segments of a batch, M = places of a segment: a few for the tokens before it, then its own, T = tokens of a
row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.batching.rows import Segment
from services.trainer.batching.to_device import to_device

CHUNK_TOKENS = 64
"""Shorter segments cost as much as one of this length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentBatch:
    """Segments that are computed together."""

    tokens_SM: torch.Tensor
    """int64[S, M]: the row's token at each place; T where there is none."""
    states_S: torch.Tensor | None
    """int64[S]: the state that each segment begins with, among those that segments without a prefix end with, batch by
    batch. None: the segments have no prefix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentBatches:
    """All segments of a row."""

    batches: tuple[SegmentBatch, ...]
    """Those without a prefix first."""
    places_T: torch.Tensor
    """int64[T]: index of each token of the row in the concatenated own places of the batches."""

    @classmethod
    def of(cls, segments: Sequence[Segment], num_before: int, device: torch.device) -> "SegmentBatches":
        """Batch the segments that cover a row in order.

        Args:
            segments: The segments. A prefix is a whole segment that has none itself.
            num_before: Places for tokens before each segment: the last of its prefix, as many as there are.
            device: For the indices.
        """
        num_tokens = segments[-1].stop
        states: dict[tuple[int, int], int] = {}
        batches: list[SegmentBatch] = []
        places_T = np.empty(num_tokens, dtype=np.int64)
        num_places = 0
        for members in _alike(segments):
            length = max(segment.stop - segment.start for segment in members)
            tokens_SM = np.full((len(members), num_before + length), num_tokens)
            for tokens_M, segment in zip(tokens_SM, members, strict=True):
                own = np.arange(segment.start, segment.stop)
                before = np.arange(max(segment.prefix_start, segment.prefix_stop - num_before), segment.prefix_stop)
                tokens_M[num_before - len(before) : num_before] = before
                tokens_M[num_before : num_before + len(own)] = own
                places_T[own] = num_places + np.arange(len(own))
                num_places += length
            if _has_prefix(members[0]):
                found = [states[segment.prefix_start, segment.prefix_stop] for segment in members]
                states_S = to_device(torch.tensor(found), device)
            else:
                states |= {(each.start, each.stop): len(states) + n for n, each in enumerate(members)}
                states_S = None
            batches.append(SegmentBatch(tokens_SM=to_device(torch.from_numpy(tokens_SM), device), states_S=states_S))
        return cls(batches=tuple(batches), places_T=to_device(torch.from_numpy(places_T), device))


def _has_prefix(segment: Segment) -> bool:
    return segment.prefix_stop > segment.prefix_start


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return segments by whether they have a prefix, and by the power of two of chunks that holds them."""
    alike: dict[tuple[bool, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        num_chunks = -(-(segment.stop - segment.start) // CHUNK_TOKENS)
        alike[_has_prefix(segment), (num_chunks - 1).bit_length()].append(segment)
    return [alike[key] for key in sorted(alike)]
