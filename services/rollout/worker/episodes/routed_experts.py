"""Reads which experts computed a turn's tokens.

Legend: R = tokens of a run, images expanded, L = layers, K = experts of a token.
"""

import numpy as np

from penstock.v1 import generate_pb2

_DTYPES: dict[int, str] = {1: "|u1", 4: "<i4"}
"""By the size of an id."""


def array_of(message: generate_pb2.RoutedExperts) -> np.ndarray:
    """Return uint8 or int32[R, L, K].

    Raises:
        ValueError: the ids do not make such an array.
    """
    num_layers, num_chosen = message.num_layers, message.num_experts_per_token
    dtype = _DTYPES.get(message.id_size_bytes)
    row_bytes = num_layers * num_chosen * message.id_size_bytes
    if dtype is None or num_layers < 1 or num_chosen < 1 or len(message.expert_ids) % row_bytes:
        raise ValueError(
            f"{len(message.expert_ids)} bytes of experts' ids, of {message.id_size_bytes} bytes each, for {num_chosen} "
            f"experts in {num_layers} layers"
        )
    ids: np.ndarray = np.frombuffer(message.expert_ids, dtype=dtype)
    return ids.reshape(-1, num_layers, num_chosen)
