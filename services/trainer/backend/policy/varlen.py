"""Attention on a GPU in half precision: one call of `torch.nn.attention.varlen` for all segments of a row.

Legend: T = tokens of a row, H = attention heads, G = key/value heads, D = head dimension, M = gathered keys of all
segments, P = tokens of prefixes, R = segments that see a prefix, and the prefix itself.

Keys and values of a row are gathered as prefix + segment, segment by segment, so that a causal call does both: causal
there means aligned at the bottom right, as in flash attention with fewer queries than keys. The gather's backward pass
sums a prefix token's gradients of all segments in float32 and in a fixed order; torch's own would add them one by one,
in half precision and in any order.

All of it can be compiled as part of a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from services.trainer.batching.rows import Segment
from services.trainer.batching.to_device import to_device


class VarlenIndex(NamedTuple):
    """A row, indexed for one call of `varlen_attn`."""

    key_tokens_M: torch.Tensor
    """int64[M]: the row's token of each gathered key."""
    own_keys_T: torch.Tensor
    """int64[T]: the gathered key of each token in its own segment."""
    prefix_tokens_P: torch.Tensor
    """int64[P]: tokens that other segments see."""
    prefix_keys_PR: torch.Tensor
    """int64[P, R]: all gathered keys of each of these; -1 stands for none."""
    cu_queries: torch.Tensor
    """int32[segments + 1]: offset of each segment's first query, then the end."""
    cu_keys: torch.Tensor
    """int32[segments + 1]: offset of each segment's first gathered key, then the end."""
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Self:
        """Index a row that the segments cover in order."""
        keys = [
            np.concatenate(
                [np.arange(segment.prefix_start, segment.prefix_stop), np.arange(segment.start, segment.stop)]
            )
            for segment in segments
        ]
        ends = np.cumsum([len(tokens) for tokens in keys])
        own = [np.arange(end - (each.stop - each.start), end) for end, each in zip(ends, segments, strict=True)]
        key_tokens_M, own_keys_T = np.concatenate(keys), np.concatenate(own)
        prefix_tokens_P, prefix_keys_PR = _keys_of_prefixes(key_tokens_M, own_keys_T)

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return to_device(torch.as_tensor(values, dtype=dtype), device)

        return cls(
            key_tokens_M=on_device(key_tokens_M, torch.int64),
            own_keys_T=on_device(own_keys_T, torch.int64),
            prefix_tokens_P=on_device(prefix_tokens_P, torch.int64),
            prefix_keys_PR=on_device(prefix_keys_PR, torch.int64),
            cu_queries=on_device([0, *(segment.stop for segment in segments)], torch.int32),
            cu_keys=on_device([0, *ends], torch.int32),
            max_queries=max(segment.stop - segment.start for segment in segments),
            max_keys=max(map(len, keys)),
        )


def _keys_of_prefixes(key_tokens_M: np.ndarray, own_keys_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that have several gathered keys, and these, filled up with -1."""
    num_keys_T = np.bincount(key_tokens_M, minlength=len(own_keys_T))
    tokens_P = np.flatnonzero(num_keys_T > 1)
    keys_PR = np.full((len(tokens_P), num_keys_T.max(initial=1)), -1)
    by_token_M = np.argsort(key_tokens_M, kind="stable")
    firsts_T = np.cumsum(num_keys_T) - num_keys_T
    for number in range(keys_PR.shape[1]):
        has_P = num_keys_T[tokens_P] > number
        keys_PR[has_P, number] = by_token_M[firsts_T[tokens_P[has_P]] + number]
    return tokens_P, keys_PR


def is_usable_for(value: torch.Tensor) -> bool:
    """Return whether attention to these values can be one call."""
    return value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)


def attend_to_prefixes(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, scaling: float, index: VarlenIndex
) -> torch.Tensor:
    """Return [T, H, D]: each segment attends to its prefix in full and to itself causally."""
    return _call(
        query_THD.contiguous(),
        gather(key_TGD, index),
        gather(value_TGD, index),
        index.cu_queries,
        index.cu_keys,
        index.max_queries,
        index.max_keys,
        scaling=scaling,
        is_causal=True,
    )


def attend_within(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    scaling: float,
    cu_segments: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Return [T, H, D]: each segment attends to all of itself and to nothing else.

    Args:
        query_THD: Queries.
        key_THD: Keys.
        value_THD: Values.
        scaling: Factor on the products of queries and keys.
        cu_segments: int32[segments + 1]: offset of each segment, then the end.
        longest: Tokens of the longest segment.
    """
    parts = (each.contiguous() for each in (query_THD, key_THD, value_THD))
    return _call(*parts, cu_segments, cu_segments, longest, longest, scaling=scaling, is_causal=False)


def _call(query: torch.Tensor, key: torch.Tensor, *further: Any, scaling: float, is_causal: bool) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if _takes_options(varlen_attn):
        options = {
            "enable_gqa": query.shape[1] != key.shape[1],
            "num_splits": 1,  # so that a row's other segments do not change the order of summation
        }
    window = (-1, 0) if is_causal else (-1, -1)
    output: torch.Tensor = varlen_attn(query, key, *further, scale=scaling, window_size=window, **options)
    return output


def _takes_options(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether this torch has them: 2.11 has neither, and does by itself what they ask for."""
    return "num_splits" in (varlen_attn.__kwdefaults__ or {})


def gather(states_TGD: torch.Tensor, index: VarlenIndex) -> torch.Tensor:
    """Return [M, G, D]: keys or values, gathered for all segments."""
    gathered: torch.Tensor = _Gathered.apply(
        states_TGD, index.key_tokens_M, index.own_keys_T, index.prefix_tokens_P, index.prefix_keys_PR
    )
    return gathered


class _Gathered(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Keys or values, gathered for all segments."""

    @staticmethod
    def forward(
        context: Any,
        states_TGD: torch.Tensor,
        key_tokens_M: torch.Tensor,
        own_keys_T: torch.Tensor,
        prefix_tokens_P: torch.Tensor,
        prefix_keys_PR: torch.Tensor,
    ) -> torch.Tensor:
        """Return [M, G, D]."""
        context.save_for_backward(own_keys_T, prefix_tokens_P, prefix_keys_PR)
        return states_TGD.index_select(0, key_tokens_M)

    @staticmethod
    def backward(context: Any, grad_MGD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return [T, G, D]."""
        own_keys_T, prefix_tokens_P, prefix_keys_PR = context.saved_tensors
        wide = torch.promote_types(grad_MGD.dtype, torch.float32)
        grad_TGD = grad_MGD.index_select(0, own_keys_T)
        of_keys = torch.where((prefix_keys_PR >= 0)[..., None, None], grad_MGD[prefix_keys_PR.clamp(min=0)], 0)
        sums_PGD = of_keys.sum(1, dtype=wide).to(grad_MGD.dtype)
        return grad_TGD.index_copy(0, prefix_tokens_P, sums_PGD), None, None, None, None
