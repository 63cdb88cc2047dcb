"""Gives the common beginning of a group's samples one choice of experts.

Samples of a group may come from different replicas, whose routers chose differently for the same prompt. A row that
holds the prompt once can replay only one choice.

Invariant: sequences of a group that begin alike have the same experts there, so that results depend neither on which of
them share a row nor on whether they share their prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.trainer.batching.packing import common_prefix_length
from services.trainer.batching.sequences import TrainGroup, TrainSequence


def with_shared_experts(group: TrainGroup) -> TrainGroup:
    """Return the group with the experts, at each token, of its first sequence that has the same tokens up to there and
    whose experts are known there."""
    sequences = group.sequences
    if not any(sequence.num_routed for sequence in sequences):
        return group
    shared = (_shared(sequence, sequences) for sequence in sequences)
    return replace(group, samples=tuple(tuple(next(shared) for _ in sample) for sample in group.samples))


def _shared(sequence: TrainSequence, group: Sequence[TrainSequence]) -> TrainSequence:
    parts: list[np.ndarray] = []
    num_known = 0
    for other in group:
        num_alike = sequence.num_inputs if other is sequence else common_prefix_length([other, sequence])
        stop = min(other.num_routed, num_alike)
        if other.routed_experts_RLK is not None and stop > num_known:
            parts.append(other.routed_experts_RLK[num_known:stop])
            num_known = stop
    experts_RLK = np.concatenate(parts) if parts else None
    own_RLK = sequence.routed_experts_RLK
    if own_RLK is not None and experts_RLK is not None and np.array_equal(own_RLK[:num_known], experts_RLK):
        return sequence  # without a copy
    return replace(sequence, routed_experts_RLK=experts_RLK)
