"""What each process of a tensor-parallel engine holds of a layer that attends linearly, with stand-ins for SGLang's
layers: heads of queries, keys and values as wholes, wherever they lie in a parameter.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import layers
from torch.nn import Module, Parameter

from services.rollout.engine.sglang_plugin.parameters import described_parameters, trainer_parameters
from services.rollout.engine.sglang_plugin.shards import Shard

K, H, D, V, HIDDEN = 4, 8, 3, 2, 5
"""Heads of queries and of keys, heads of values, sizes of a head of keys and of values, hidden size."""
KEYS, VALUES = K * D, H * V
LAYER = "model.layers.0.linear_attn"
WHOLE = {
    f"{LAYER}.in_proj_qkv.weight": (2 * KEYS + VALUES, HIDDEN),
    f"{LAYER}.in_proj_z.weight": (VALUES, HIDDEN),
    f"{LAYER}.in_proj_b.weight": (H, HIDDEN),
    f"{LAYER}.in_proj_a.weight": (H, HIDDEN),
    f"{LAYER}.conv1d.weight": (2 * KEYS + VALUES, 1, 4),
    f"{LAYER}.A_log": (H,),
    f"{LAYER}.dt_bias": (H,),
    f"{LAYER}.norm.weight": (V,),
    f"{LAYER}.out_proj.weight": (HIDDEN, VALUES),
}
"""Shapes of the trainer's parameters."""


class Column(Module):
    """A layer whose rows are divided."""


class Merged(Column):
    """Several of them."""


class Row(Module):
    """A layer whose columns are divided."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of SGLang's layers, which would take seconds to import, and the process group of an engine to make."""
    linear: Any = ModuleType("linear")
    linear.ColumnParallelLinear, linear.MergedColumnParallelLinear = Column, Merged
    linear.RowParallelLinear, linear.QKVParallelLinear = Row, type("Other", (), {})
    embedding: Any = ModuleType("vocab_parallel_embedding")
    embedding.VocabParallelEmbedding = type("Other", (), {})
    experts: Any = ModuleType("layer")
    experts.FusedMoE = type("Other", (), {})
    monkeypatch.setattr(layers, "linear", linear, raising=False)
    for name, module in (
        ("linear", linear),
        ("vocab_parallel_embedding", embedding),
        ("moe.fused_moe_triton.layer", experts),
    ):
        monkeypatch.setitem(sys.modules, f"{layers.__name__}.{name}", module)


def layer_of(kind: type[Module], rank: int, count: int, shape: tuple[int, ...], **sizes: Any) -> Module:
    """A layer as one process holds it."""
    layer = kind()
    layer.weight = Parameter(torch.zeros(shape), requires_grad=False)
    layer.tp_group = SimpleNamespace(rank_in_group=rank, world_size=count)
    for name, value in sizes.items():
        setattr(layer, name, value)
    return layer


def model_of(rank: int, count: int) -> Module:
    """A model with one layer that attends linearly, as one process of several holds it."""
    attention = Module()
    attention.num_v_heads, attention.key_dim, attention.value_dim = H, KEYS, VALUES  # of all processes, as in SGLang
    attention.attn_tp_rank, attention.attn_tp_size = rank, count
    mixed = (2 * KEYS + VALUES) // count
    attention.conv1d = layer_of(Column, rank, count, (mixed, 1, 4), output_size=mixed * count)
    attention.in_proj_qkvz = layer_of(
        Merged,
        rank,
        count,
        (mixed + VALUES // count, HIDDEN),
        output_sizes=[KEYS, KEYS, VALUES, VALUES],
    )
    attention.in_proj_ba = layer_of(Merged, rank, count, (2 * H // count, HIDDEN), output_sizes=[H, H])
    attention.out_proj = layer_of(Row, rank, count, (HIDDEN, VALUES // count), input_size=VALUES)
    for name in ("dt_bias", "A_log"):
        setattr(attention, name, Parameter(torch.zeros(H // count), requires_grad=False))
    attention.norm = torch.nn.RMSNorm(V)
    block, inner, model = Module(), Module(), Module()
    block.linear_attn = attention
    inner.layers = torch.nn.ModuleList([block])
    model.model, model.config = inner, SimpleNamespace()
    return model.requires_grad_(requires_grad=False)


def whole_of(name: str) -> torch.Tensor:
    """One with a different value everywhere."""
    return torch.arange(float(torch.Size(WHOLE[name]).numel())).reshape(WHOLE[name])


def written(rank: int, count: int) -> tuple[Any, dict[str, Shard]]:
    """A model into which a process has written its shards of all parameters, and these."""
    model = model_of(rank, count)
    shards = dict(trainer_parameters(model))
    for name, shard in shards.items():
        shard.write(whole_of(name))
    return model.model.layers[0].linear_attn, shards


def heads_of(whole: torch.Tensor, first: int, size: int, heads: range) -> torch.Tensor:
    """The rows of some heads, in a section that begins with row `first`."""
    return whole[first + heads.start * size : first + heads.stop * size]


def mixed_of(whole: torch.Tensor, rank: int, count: int) -> list[torch.Tensor]:
    """A process's rows of queries, keys and values."""
    of_keys, of_values = (range(rank * number // count, (rank + 1) * number // count) for number in (K, H))
    return [
        heads_of(whole, 0, D, of_keys),
        heads_of(whole, KEYS, D, of_keys),
        heads_of(whole, 2 * KEYS, V, of_values),
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_processes_of_an_engine_describe_the_trainers_parameters(count: int) -> None:
    """Whole, each of them."""
    for rank in range(count):
        described = described_parameters(model_of(rank, count))
        assert set(described) == set(WHOLE)
        shapes = {name: shard.shape for name, shard in trainer_parameters(model_of(rank, count))}
        assert shapes == WHOLE


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_process_takes_its_heads_of_every_parameter(count: int) -> None:
    """In SGLang's order: queries, keys, values and gates below each other, then b and a."""
    for rank in range(count):
        attention, _ = written(rank, count)
        of_values = range(rank * H // count, (rank + 1) * H // count)
        whole = {name.removeprefix(f"{LAYER}."): whole_of(name) for name in WHOLE}
        mixed, gates = whole["in_proj_qkv.weight"], whole["in_proj_z.weight"]
        qkvz = [*mixed_of(mixed, rank, count), heads_of(gates, 0, V, of_values)]
        assert torch.equal(attention.in_proj_qkvz.weight, torch.cat(qkvz))
        ba = [heads_of(whole[name], 0, 1, of_values) for name in ("in_proj_b.weight", "in_proj_a.weight")]
        assert torch.equal(attention.in_proj_ba.weight, torch.cat(ba))
        for name in ("A_log", "dt_bias"):
            assert torch.equal(getattr(attention, name), heads_of(whole[name], 0, 1, of_values))
        columns = heads_of(whole["out_proj.weight"].T, 0, V, of_values).T
        assert torch.equal(attention.out_proj.weight, columns)
        assert torch.equal(attention.norm.weight, whole["norm.weight"])
        assert torch.equal(attention.conv1d.weight, torch.cat(mixed_of(whole["conv1d.weight"], rank, count)))


def test_shards_together_are_the_parameter() -> None:
    """As the processes put it together for its digest."""
    of_ranks = [written(rank, 2)[1] for rank in range(2)]
    for name in WHOLE:
        whole = torch.full(WHOLE[name], -1.0)
        for rank, shards in enumerate(of_ranks):
            shard = shards[name]
            if shard.cut is None:
                assert name.endswith("norm.weight"), "all other parameters are divided"
                whole = shard.tensor
                continue
            padded = shard.padded_into(torch.empty(shard.stride_bytes, dtype=torch.uint8))
            for place, held in zip(shard.of_rank(rank, whole), shard.unpadded(padded, rank), strict=True):
                place.copy_(held)
        assert torch.equal(whole, whole_of(name))
