"""Engines whose processes divide a layer's experts as wholes, with stand-ins for SGLang's layers."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from services.rollout.engine.sglang_plugin.cpu_experts import compute_own
from services.rollout.engine.sglang_plugin.shards import _of_experts

E, H, INNER = 6, 5, 4
"""Experts of a layer, hidden size, inner size."""


def layer_of(rank: int, count: int, *, by_parts: bool = False) -> Any:
    """What a process sees of a layer whose experts are divided among `count` processes."""
    of_wholes, of_parts = ((0, 1), (rank, count)) if by_parts else ((rank, count), (0, 1))
    return SimpleNamespace(
        moe_ep_rank=of_wholes[0], moe_ep_size=of_wholes[1], moe_tp_rank=of_parts[0], moe_tp_size=of_parts[1]
    )


@pytest.mark.parametrize(("kind", "shape"), [("w13_weight", (E, 2 * INNER, H)), ("w2_weight", (E, H, INNER))])
def test_a_process_has_its_experts(kind: str, shape: tuple[int, ...]) -> None:
    """Neighbouring ones, whole, as SGLang numbers them; not a part of each."""
    whole = torch.randn(shape)
    for rank in range(2):
        shard = _of_experts(layer_of(rank, 2), kind, torch.zeros(E // 2, *shape[1:]))
        assert shard.shape == shape
        shard.write(whole)
        assert torch.equal(shard.tensor, whole[3 * rank : 3 * rank + 3])


def test_experts_that_are_divided_twice_are_refused() -> None:
    """Whole ones among some processes, each of them among others: SGLang can, pushes cannot."""
    layer = layer_of(0, 2)
    layer.moe_tp_size = 2
    with pytest.raises(ValueError, match=r"set rollout\.expert_parallel to rollout\.tensor_parallel, or leave it out"):
        _of_experts(layer, "w2_weight", torch.zeros(3, H, 2))


class _Chosen(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


class _Dispatched(NamedTuple):
    hidden_states: torch.Tensor
    topk_output: _Chosen


class _Output(NamedTuple):
    hidden_states: torch.Tensor


def plain(matrices: torch.Tensor, dispatched: Any) -> torch.Tensor:
    """Each token's weighted sum over its experts, which are matrices."""
    chosen = dispatched.topk_output
    of_each = torch.einsum("tkhi,ti->tkh", matrices[chosen.topk_ids.long()], dispatched.hidden_states)
    return (of_each * chosen.topk_weights[..., None]).sum(1)


def test_what_the_processes_compute_is_what_one_computes() -> None:
    """Together; one of them has no expert of any token, another two of the same."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(E, H, H, generator=generator)
    hidden = torch.randn(4, H, generator=generator)
    experts = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    weights = torch.rand(4, 2, generator=generator)

    def dispatched(ids: torch.Tensor) -> _Dispatched:
        return _Dispatched(hidden, _Chosen(weights, ids))

    total = torch.zeros(4, H)
    for rank in range(2):
        first = 3 * rank
        is_own = (experts >= first) & (experts < first + 3)
        ids = torch.where(is_own, experts - first, -1)

        def compute(_: Any, *, layer: Any, dispatch_output: Any, first: int = first) -> _Output:
            assert (dispatch_output.topk_output.topk_ids >= 0).all()
            return _Output(plain(matrices[first : first + 3], dispatch_output))

        total += compute_own(compute, None, layer=layer_of(rank, 2), dispatch_output=dispatched(ids)).hidden_states
    torch.testing.assert_close(total, plain(matrices, dispatched(experts)))
    alone = compute_own(
        lambda _, *, layer, dispatch_output: _Output(plain(matrices, dispatch_output)),
        None,
        layer=layer_of(0, 1),
        dispatch_output=dispatched(experts),
    )
    torch.testing.assert_close(alone.hidden_states, total)
