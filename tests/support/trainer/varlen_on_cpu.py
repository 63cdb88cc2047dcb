"""`torch.nn.attention.varlen.varlen_attn` in plain products, with the signature of torch 2.11, as an operation of torch
that its compiler cannot look into. So what is compiled for a GPU can be traced and computed without one.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Attend segment by segment: [T, H, D]."""
    is_causal = {(-1, 0): True, (-1, -1): False}[window_size]
    output: torch.Tensor = _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale)
    return output


@torch.library.custom_op("penstock_tests::varlen", mutates_args=())  # type: ignore[misc]  # torch is untyped here
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    assert (cu_seq_q.diff() <= max_q).all()
    assert (cu_seq_k.diff() <= max_k).all()
    output = torch.empty_like(query)
    for queries, keys in _segments(cu_seq_q, cu_seq_k):
        weights = _weights(query[queries], key[keys], is_causal=is_causal, scale=scale)
        output[queries] = (weights @ _heads(value[keys], query)).transpose(0, 1)
    return output


@torch.library.custom_op("penstock_tests::varlen_backward", mutates_args=())  # type: ignore[misc]
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))
    shared = (-1, query.shape[1] // key.shape[1])
    for queries, keys in _segments(cu_seq_q, cu_seq_k):
        weights = _weights(query[queries], key[keys], is_causal=is_causal, scale=scale)
        of_output = grad[queries].transpose(0, 1)
        of_weights = of_output @ _heads(value[keys], query).mT
        of_products = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        grad_query[queries] = (of_products @ _heads(key[keys], query)).transpose(0, 1)
        of_key, of_value = of_products.mT @ query[queries].transpose(0, 1), weights.mT @ of_output
        grad_key[keys] = of_key.transpose(0, 1).unflatten(1, shared).sum(2)
        grad_value[keys] = of_value.transpose(0, 1).unflatten(1, shared).sum(2)
    return [grad_query, grad_key, grad_value]


def _segments(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    edges = zip(cu_seq_q.tolist(), cu_seq_k.tolist(), strict=True)
    for (query, key), (next_query, next_key) in itertools.pairwise(edges):
        yield slice(query, next_query), slice(key, next_key)


def _heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return [H, K, D]: keys or values once for each head of the queries."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1).transpose(0, 1)


def _weights(query: torch.Tensor, key: torch.Tensor, *, is_causal: bool, scale: float) -> torch.Tensor:
    """Return [H, Q, K]. Causal means aligned at the bottom right."""
    products = query.transpose(0, 1) @ _heads(key, query).mT * scale
    if is_causal:
        num_queries, num_keys = products.shape[1:]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        products = products.masked_fill(~seen, -torch.inf)
    return products.softmax(-1)


@_forward.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query)


@_backward.register_fake
def _(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> Sequence[torch.Tensor]:
    return [torch.empty_like(each) for each in (query, key, value)]


def _keep(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    *tensors, _, _, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_backward(grad, *context.saved_tensors, context.is_causal, context.scale), *[None] * 6


_forward.register_autograd(_differentiate, setup_context=_keep)
