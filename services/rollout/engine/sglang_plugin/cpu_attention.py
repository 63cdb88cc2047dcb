"""Attention on a CPU for many sequences at once. Runs inside SGLang's scheduler.

SGLang's back end `torch_native` computes one sequence after the other, and recomputes the queries of a cached prefix
only to drop them. Here a forward pass is planned once for all layers. Sequences with one new token each are computed
together, their keys padded to the longest, and so are prompts of the same length.

Invariants: each sequence gets the same result as from `torch_native`, up to the order of float32 sums, and reads only
its own keys.

Legend: B = sequences of a block, Q = new tokens of each, L = keys of the longest, H = heads, K = heads of keys,
D = size of a head.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_BLOCK_KEYS = 32_768
"""Maximum keys of a block, padding included, unless one sequence has more: copying keys and values takes memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Sequences that are computed together."""

    shape: tuple[int, int, int]
    """B, Q, L."""
    rows_BQ: torch.Tensor
    """Flat row numbers of the new tokens in the pass."""
    places_BL: torch.Tensor
    """Flat places of the keys in the cache."""
    mask: torch.Tensor | None
    """Which keys each query sees, broadcastable to [B, heads, Q, L]; None: those up to its own position."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """The blocks of one forward pass."""

    seq_lens: torch.Tensor
    """SGLang's tensor of the pass for which this was planned; it identifies the pass."""
    blocks: tuple[_Block, ...]


def plan(_result: None, backend: Any, forward_batch: Any) -> None:
    """Hook after the back end has prepared a forward pass."""
    num_keys = forward_batch.seq_lens.tolist()
    num_new = [1] * len(num_keys)
    if forward_batch.forward_mode.is_extend() and forward_batch.extend_seq_lens is not None:
        num_new = forward_batch.extend_seq_lens.tolist()
    locations = backend.req_to_token_pool.req_to_token
    blocks = _plan_blocks(locations, forward_batch.req_pool_indices, num_keys=num_keys, num_new=num_new)
    backend.forward_metadata = _Plan(seq_lens=forward_batch.seq_lens, blocks=tuple(blocks))


def extend(original: Callable[..., torch.Tensor], backend: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Hook around the attention of any number of new tokens per sequence, with or without a cached prefix."""
    if not options["causal"]:
        return original(backend, *args, **options)
    return decode(original, backend, *args, **options)


def decode(original: Callable[..., torch.Tensor], backend: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Hook around the attention of one new token per sequence."""
    query, output, k_cache, v_cache, _, _, seq_lens, *_, encoder_lens = args
    planned: _Plan | None = backend.forward_metadata
    is_plain = encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None
    if not is_plain or planned is None or planned.seq_lens is not seq_lens:
        return original(backend, *args, **options)
    for block in planned.blocks:
        output[block.rows_BQ] = _attend(block, query, k_cache, v_cache, scale=options["scaling"])
    return output


def _attend(
    block: _Block, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Return the attention of the block's new tokens, [B * Q, H, size of a value].

    Args:
        block: The sequences.
        query: The new tokens of the pass, [tokens, H, D].
        k_cache: Keys of all sequences, [locations, K, D].
        v_cache: Values, likewise.
        scale: Factor of the products of queries and keys.
    """
    (num_sequences, num_new, longest), (_, num_heads, size) = block.shape, query.shape
    num_key_heads = k_cache.shape[1]
    keys, values = (  # [B, K, L, D]
        cache.index_select(0, block.places_BL)
        .to(query.dtype)
        .view(num_sequences, longest, *cache.shape[1:])
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    new = query.index_select(0, block.rows_BQ)
    if num_new == 1:  # query heads that share keys take the dimension of the new tokens
        new = new.view(num_sequences, num_key_heads, num_heads // num_key_heads, size)
        attended = scaled_dot_product_attention(new, keys, values, attn_mask=block.mask, scale=scale)
        return attended.reshape(num_sequences, num_heads, -1)
    attended = scaled_dot_product_attention(
        new.view(num_sequences, num_new, num_heads, size).transpose(1, 2),
        keys,
        values,
        attn_mask=block.mask,
        is_causal=block.mask is None,
        scale=scale,
        enable_gqa=num_heads != num_key_heads,
    )
    return attended.transpose(1, 2).reshape(num_sequences * num_new, num_heads, -1)


def _plan_blocks(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, *, num_keys: Sequence[int], num_new: Sequence[int]
) -> Iterator[_Block]:
    """Yield the blocks of a pass.

    Args:
        req_to_token: The locations of each request's tokens, [requests, positions].
        req_pool_indices: Each sequence's row in `req_to_token`.
        num_keys: Tokens of each sequence, new ones included.
        num_new: New tokens of each.
    """
    starts = [0, *itertools.accumulate(num_new)]
    for members in _grouped(num_keys, num_new):
        new, longest = num_new[members[0]], num_keys[members[-1]]
        num_keys_B1 = torch.tensor([[num_keys[member]] for member in members])
        positions_L, offsets_Q = torch.arange(longest), torch.arange(new)
        places_BL = req_to_token[req_pool_indices[torch.tensor(members)], :longest]
        mask = None
        if new == 1:
            is_own_BL = positions_L < num_keys_B1
            # Past its end, a row holds locations of other sequences.
            places_BL = torch.where(is_own_BL, places_BL, places_BL[:, :1])
            mask = is_own_BL[:, None, None]
        elif new < longest:
            mask = positions_L <= (longest - new + offsets_Q).unsqueeze(1)
        rows_BQ = torch.tensor([[starts[member]] for member in members]) + offsets_Q
        yield _Block(
            shape=(len(members), new, longest), rows_BQ=rows_BQ.flatten(), places_BL=places_BL.flatten(), mask=mask
        )


def _grouped(num_keys: Sequence[int], num_new: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of sequence numbers, either with one new token each or of equal lengths, the longest last."""
    order = sorted(range(len(num_keys)), key=lambda number: (num_new[number], num_keys[number]))
    for _, alike in itertools.groupby(
        order, key=lambda number: (num_new[number], 0 if num_new[number] == 1 else num_keys[number])
    ):
        group: list[int] = []
        for number in alike:
            if group and (len(group) + 1) * num_keys[number] > MAX_BLOCK_KEYS:
                yield group
                group = []
            group.append(number)
        yield group
