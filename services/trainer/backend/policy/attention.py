"""Attention over packed rows, for any transformers model that takes its attention function from `AttentionInterface`.

Legend: T = tokens of a row, H = attention heads, G = key/value heads, D = head dimension, S = query ranges of a bucket,
Q = their length, P = tokens that a range sees in full, K = P and Q together.

Each segment of a row attends to its prefix segment in full and to itself causally. Keys and values are gathered as
prefix + segment, so a single causal call does both: query i of a segment sees the keys up to prefix + i. The gather's
backward pass sums the gradients of all responses in the prompt's keys. No T x T mask exists.

On a GPU in half precision: one call per layer (`varlen`). Elsewhere: scaled_dot_product_attention, one call per bucket
of query ranges that see the same number of tokens in full and have nearly the same length.

Where ranks share a row, each computes its heads for all tokens (`row_share`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.errors import ConfigError
from services.trainer.backend.policy import varlen
from services.trainer.backend.policy.layer_kinds import FULL, LINEAR, kinds_of_layers
from services.trainer.backend.policy.row_share import RowShare
from services.trainer.batching.rows import Segment
from services.trainer.batching.segment_batches import SegmentBatches

NAME = "penstock_packed"
"""Name of `packed_attention` in transformers. It has no mask function, so transformers builds no mask."""
NAME_IN_COMPILED = f"{NAME}_in_compiled"
"""The same function in layers that are compiled."""
BUCKET_MULTIPLE = 16
"""Query ranges whose lengths round up to the same multiple share a call."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, "RowLayout"], torch.Tensor]
"""Takes queries [T, H, D], keys and values [T, G, D], the factor on products, and the row; returns [T, H, D]."""
BLOCK_QUERIES = 256
"""Length of the query ranges that a segment with a prefix is cut into, each of which sees all earlier tokens in full: a
masked call computes the whole rectangle, and a long segment would discard almost half of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Query ranges that see the same number of tokens in full, padded at the end to one length."""

    query_tokens_SQ: torch.Tensor
    """int64[S, Q]: the row's token of each query; for padding, the range's first token."""
    key_tokens_SK: torch.Tensor
    """int64[S, K]: the tokens seen in full, then the range. Only padding queries see padding keys."""
    mask_QK: torch.Tensor | None
    """bool[Q, K]; None if nothing is seen in full: plain causal attention is then equivalent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _QueryRange:
    """Tokens [start, stop) of a row."""

    start: int
    stop: int
    seen_P: torch.Tensor
    """int64[P]: the tokens that all of them see; each also sees the range causally."""


class RowLayout:
    """The segments of a row, as indices for the attention of every layer. Made once per forward pass."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        """Describe a row that the segments cover in order."""
        self._segments = segments
        self._device = device
        self._batches: dict[int, SegmentBatches] = {}

    @cached_property
    def varlen_index(self) -> varlen.VarlenIndex:
        """The index for a GPU in half precision."""
        return varlen.VarlenIndex.of(self._segments, self._device)

    def make_varlen_index(self) -> None:
        """Make the index now: layers that are compiled can only read it."""
        self.__dict__["varlen_index"] = self.varlen_index

    def segment_batches(self, num_before: int) -> SegmentBatches:
        """Return the index for layers that attend linearly.

        Args:
            num_before: Tokens before a segment that it sees.
        """
        if num_before not in self._batches:
            self._batches[num_before] = SegmentBatches.of(self._segments, num_before, self._device)
        return self._batches[num_before]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets for scaled_dot_product_attention."""
        return tuple(self._bucket(length, members) for (_, length), members in self._alike.items())

    @cached_property
    def bucket_rows_T(self) -> torch.Tensor:
        """int64[T]: index of each token of the row in the concatenated outputs of the buckets."""
        rows_T = torch.empty(self._segments[-1].stop, dtype=torch.int64)
        first_row = 0
        for (_, length), members in self._alike.items():
            for queries in members:
                num_tokens = queries.stop - queries.start
                rows_T[queries.start : queries.stop] = torch.arange(first_row, first_row + num_tokens)
                first_row += length
        return rows_T.to(self._device)

    @cached_property
    def _alike(self) -> dict[tuple[int, int], list[_QueryRange]]:
        """Query ranges by the tokens that they see in full and by their rounded length."""
        alike: dict[tuple[int, int], list[_QueryRange]] = defaultdict(list)
        for queries in (queries for segment in self._segments for queries in _query_ranges(segment)):
            length = -(-(queries.stop - queries.start) // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
            alike[len(queries.seen_P), length].append(queries)
        return alike

    def _bucket(self, length: int, members: Sequence[_QueryRange]) -> Bucket:
        starts_S = torch.tensor([queries.start for queries in members])
        stops_S = torch.tensor([queries.stop for queries in members])
        query_tokens_SQ = starts_S[:, None] + torch.arange(length)
        query_tokens_SQ = torch.where(query_tokens_SQ < stops_S[:, None], query_tokens_SQ, starts_S[:, None])
        seen_SP = torch.stack([queries.seen_P for queries in members])
        num_seen = seen_SP.shape[1]
        mask_QK = torch.ones(length, num_seen + length, dtype=torch.bool).tril(num_seen) if num_seen else None
        return Bucket(
            query_tokens_SQ=query_tokens_SQ.to(self._device),
            key_tokens_SK=torch.cat([seen_SP, query_tokens_SQ], dim=1).to(self._device),
            mask_QK=None if mask_QK is None else mask_QK.to(self._device),
        )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    row_layout: RowLayout,
    row_share: RowShare | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    in_buckets: Attend | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, D] and no weights, as transformers expects of an attention function.

    Where ranks share a row, T is here the number of this rank's tokens.

    Args:
        module: The attention layer; not used.
        query: [1, H, T, D].
        key: [1, G, T, D].
        value: [1, G, T, D]; its dtype is that of the products, because autocast does not reach every kernel.
        attention_mask: None: transformers builds none for a function that it does not know.
        scaling: Factor on the products of queries and keys.
        row_layout: The row's segments, passed to the model's forward as a keyword.
        row_share: This rank's share of the row; None: all of it.
        sliding_window: Must be None, like the next two: some models need these, but packed rows do not support them.
        softcap: Bound on the products.
        s_aux: Attention sinks.
        in_buckets: Computes it elsewhere than on a GPU in half precision; None: `_attend_buckets`.

    Raises:
        ConfigError: the model needs one of the last three.
    """
    assert attention_mask is None, "packed rows need no mask"
    wanted = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    if unknown := [name for name, value in wanted.items() if value is not None]:
        raise ConfigError(
            f"the model attends with {', '.join(unknown)}, which the trainer's packed rows do not do; "
            "train a model of a family in docs/training/models.md"
        )
    compute = _attend_varlen if varlen.is_usable_for(value) else in_buckets or _attend_buckets
    return _attend(compute, query, key, value, scaling, row_layout, row_share), None


def packed_attention_of_gpus(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    row_layout: RowLayout,
    row_share: RowShare | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute `packed_attention` on a GPU in half precision. `penstock plan` gets its sizes without a GPU."""
    return _attend(_attend_varlen, query, key, value, scaling, row_layout, row_share), None


def _attend(
    compute: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    layout: RowLayout,
    share: RowShare | None,
) -> torch.Tensor:
    if share is not None:
        query, key, value = share.heads_of(query, key, value)
    output = compute(*_of_tokens(query, key, value), scaling, layout)[None]
    return output if share is None else share.tokens_of(output)


def _of_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [T, H, D], [T, G, D] and [T, G, D] from [1, H, T, D] and so on, in the precision of the last."""
    query_THD, key_TGD, value_TGD = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))
    return query_THD, key_TGD, value_TGD


def _attend_varlen(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, scaling: float, layout: RowLayout
) -> torch.Tensor:
    return varlen.attend_to_prefixes(query_THD, key_TGD, value_TGD, scaling, layout.varlen_index)


def _attend_buckets(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, scaling: float, layout: RowLayout
) -> torch.Tensor:
    gqa = query_THD.shape[1] != key_TGD.shape[1]
    outputs = []
    for bucket in layout.buckets:
        output = scaled_dot_product_attention(
            _take(query_THD, bucket.query_tokens_SQ).transpose(1, 2),
            _take(key_TGD, bucket.key_tokens_SK).transpose(1, 2),
            _take(value_TGD, bucket.key_tokens_SK).transpose(1, 2),
            attn_mask=bucket.mask_QK,
            is_causal=bucket.mask_QK is None,
            scale=scaling,
            enable_gqa=gqa,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _take(torch.cat(outputs), layout.bucket_rows_T)


def _take(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return `rows[numbers]`.

    Its backward pass takes a CPU nine times as long as that of `index_select`, which on a GPU adds in any order.
    """
    if rows.is_cuda:
        return rows[numbers]
    return rows.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)


def use_packed_attention(model: Any, *, is_compiled: bool = False) -> None:
    """Make the text part of a transformers model attend with `packed_attention`, but for layers that attend linearly.

    Args:
        model: The model.
        is_compiled: Whether its layers will be compiled.

    Raises:
        ConfigError: a layer of the model attends in a way that packed rows do not reproduce.
    """
    from transformers import AttentionInterface

    text_config = model.config.get_text_config()
    chosen, function = NAME, packed_attention
    if is_compiled:  # the buckets' calls, of which each row has another number, would be compiled for each number
        chosen = NAME_IN_COMPILED
        function = partial(packed_attention, in_buckets=torch.compiler.disable(_attend_buckets))
    AttentionInterface.register(chosen, function)
    parts = {name: chosen for name in model.config.sub_configs if getattr(model.config, name) is text_config}
    model.set_attn_implementation(parts or chosen)
    layer_types = set(kinds_of_layers(text_config))
    if not layer_types <= {FULL, LINEAR} or text_config._attn_implementation != chosen:
        raise ConfigError(
            f"models of type {model.config.model_type} cannot read packed rows: the trainer needs layers of full or "
            f"linear attention ({sorted(layer_types)} found) whose function can be chosen; choose another model"
        )


def _query_ranges(segment: Segment) -> Iterator[_QueryRange]:
    """Cut a segment that has a prefix; without one, causal attention wastes nothing."""
    prefix = torch.arange(segment.prefix_start, segment.prefix_stop)
    step = BLOCK_QUERIES if len(prefix) else segment.stop - segment.start
    for start in range(segment.start, segment.stop, step):
        seen_P = torch.cat([prefix, torch.arange(segment.start, start)])
        yield _QueryRange(start=start, stop=min(start + step, segment.stop), seen_P=seen_P)
