"""Turns the experts that SGLang reports of a turn into a message."""

import base64

import numpy as np

from penstock.model.families.experts import MixtureShape
from penstock.v1 import generate_pb2

_MOST_IN_A_BYTE = 256


def read_ids(encoded: str) -> np.ndarray:
    """Return int32 ids, token by token, layer by layer, from the form in which SGLang reports them."""
    return np.frombuffer(base64.b64decode(encoded), dtype="<i4")


def message_of(
    ids: np.ndarray, shape: MixtureShape, *, first_token: int, num_tokens: int
) -> generate_pb2.RoutedExperts:
    """Return the experts of a turn's tokens.

    Args:
        ids: From `read_ids`.
        shape: The model's.
        first_token: Index of the first token that was asked for.
        num_tokens: Tokens of prompt and output; the last has not been computed.

    Raises:
        RuntimeError: the number of experts does not match that of the tokens in this model.
    """
    num_computed = num_tokens - 1 - first_token
    expected = num_computed * shape.num_layers * shape.num_experts_per_token
    if ids.size != expected or (ids.size and not 0 <= ids.min() <= ids.max() < shape.num_experts):
        span = f", from {ids.min()} to {ids.max()}" if ids.size else ""
        raise RuntimeError(
            f"SGLang reports {ids.size} ids of experts{span}, where {num_computed} tokens have {expected} below "
            f"{shape.num_experts}"
        )
    size_bytes = 1 if shape.num_experts <= _MOST_IN_A_BYTE else 4
    return generate_pb2.RoutedExperts(
        first_token=first_token,
        num_layers=shape.num_layers,
        num_experts_per_token=shape.num_experts_per_token,
        id_size_bytes=size_bytes,
        expert_ids=ids.astype(f"<u{size_bytes}").tobytes(),
    )
