"""Each tensor-parallel process's shards of the parameters.

SGLang divides most matrices among an engine's processes: by rows, by columns, or projection by projection where it
fuses several. Each process holds one shard, and several may hold the same shard of keys and values. Runs inside
SGLang's scheduler processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is divided: along one dimension, each of its projections separately."""

    dim: int
    size: int
    """Size of the whole parameter along the dimension."""
    stride: int
    """Distance between the starts of two shards in a projection. The last shards may be shorter, or empty."""
    rank: int
    """Number of this process's shard."""
    projections: int = 1
    """Number of projections that follow each other along the dimension."""
    replicas: int = 1
    """Number of adjacent processes that hold the same shard."""

    @property
    def of_projection(self) -> int:
        """Size of one projection along the dimension."""
        return self.size // self.projections

    @property
    def length(self) -> int:
        """Length of this process's shard of a projection."""
        return self.length_of(self.rank)

    def start_of(self, rank: int) -> int:
        """Return where the rank's shard begins in a projection."""
        return min(rank * self.stride, self.of_projection)

    def length_of(self, rank: int) -> int:
        """Return the length of the rank's shard of a projection."""
        return min(self.stride, self.of_projection - self.start_of(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One process's part of a parameter."""

    tensor: torch.Tensor
    """A view of SGLang's memory, without padding."""
    cut: Cut | None = None
    """None: every process holds the whole parameter."""

    def __post_init__(self) -> None:
        """Refuse a tensor that does not have the cut's shape."""
        cut = self.cut
        if cut is not None and self.tensor.shape[cut.dim] != cut.projections * cut.length:
            raise ValueError(
                f"SGLang's shard of a parameter has the shape {list(self.tensor.shape)}, which is not that of {cut}; "
                "choose a rollout.tensor_parallel that divides the model's sizes"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        shape = list(self.tensor.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.size
        return tuple(shape)

    @property
    def whole_bytes(self) -> int:
        """Size of the whole parameter."""
        return math.prod(self.shape) * int(self.tensor.itemsize)

    @property
    def stride_bytes(self) -> int:
        """Size of the longest shard."""
        return math.prod(self._padded_shape()) * int(self.tensor.itemsize)

    def write(self, whole: torch.Tensor) -> None:
        """Copy this process's shard out of the whole parameter."""
        if self.cut is None:
            self.tensor.copy_(whole)
        else:
            self._by_projection().copy_(self.of_rank(self.cut.rank, whole))

    def of_rank(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """Return a rank's shard of the whole, as a view with one more dimension: [..., projection, shard, ...]."""
        cut = self.cut
        assert cut is not None
        by_projection = whole.unflatten(cut.dim, (cut.projections, cut.of_projection))
        return by_projection.narrow(cut.dim + 1, cut.start_of(rank), cut.length_of(rank))

    def padded_into(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this process's shard with that dimension, as long as the longest: a view, or a copy.

        Args:
            memory: uint8[at least `stride_bytes`] for the copy.
        """
        cut = self.cut
        assert cut is not None
        mine = self._by_projection()
        if cut.length == cut.stride and mine.is_contiguous():
            return mine
        padded = memory[: self.stride_bytes].view(mine.dtype).view(self._padded_shape())
        padded.narrow(cut.dim + 1, 0, cut.length).copy_(mine)
        return padded

    def _by_projection(self) -> torch.Tensor:
        assert self.cut is not None
        return self.tensor.unflatten(self.cut.dim, (self.cut.projections, self.cut.length))

    def _padded_shape(self) -> tuple[int, ...]:
        assert self.cut is not None
        before, after = self.tensor.shape[: self.cut.dim], self.tensor.shape[self.cut.dim + 1 :]
        return (*before, self.cut.projections, self.cut.stride, *after)


def shards_of(
    owner: Any, kind: str, tensor: torch.Tensor, num_names: int, inner_size: int | None = None
) -> list[Shard]:
    """Take apart what SGLang stores as one parameter of a layer.

    Args:
        owner: The layer.
        kind: SGLang's name of the parameter: weight, bias.
        tensor: The parameter.
        num_names: Number of the trainer's parameters that it holds.
        inner_size: For a layer into or out of the middle of an MLP: the middle's size without SGLang's padding.

    Raises:
        ValueError: it is divided in an unknown way.
    """
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(owner, VocabParallelEmbedding):
        return [_of_embedding(owner, tensor)]
    if isinstance(owner, linear.QKVParallelLinear):
        return _of_heads(owner, tensor, num_names)
    if isinstance(owner, FusedMoE):
        return [_of_experts(owner, kind, tensor)]
    rank, count = _rank_and_count(owner)
    if isinstance(owner, linear.MergedColumnParallelLinear):
        sizes = _sizes_by_name(owner.output_sizes, num_names, count=count)
        pairs = zip(tensor.split([size // count for size in sizes]), sizes, strict=True)
        return [_padded_shard(each, 0, size, inner_size, rank=rank, count=count) for each, size in pairs]
    if isinstance(owner, linear.ColumnParallelLinear):
        return [_shard(tensor, dim=0, size=owner.output_size, rank=rank, count=count)]
    if isinstance(owner, linear.RowParallelLinear) and kind == "weight":
        return [_padded_shard(tensor, 1, owner.input_size, inner_size, rank=rank, count=count)]
    return [Shard(tensor=tensor)]


def _sizes_by_name(sizes: Sequence[int], num_names: int, *, count: int) -> list[int]:
    """Return the sizes of the trainer's parameters: the first may hold several of SGLang's projections.

    Raises:
        ValueError: it does, and processes would hold a part of each.
    """
    num_in_first = len(sizes) - num_names + 1
    if num_in_first > 1 and count > 1:
        raise ValueError(
            f"projections of {', '.join(map(str, sizes))} rows are {num_names} parameters of the trainer, which are "
            "not divided among processes; set rollout.tensor_parallel = 1"
        )
    return [sum(sizes[:num_in_first]), *sizes[num_in_first:]]


def _shard(
    tensor: torch.Tensor, *, dim: int, size: int, rank: int, count: int, projections: int = 1, replicas: int = 1
) -> Shard:
    if count == 1:
        return Shard(tensor=tensor)
    stride = size // projections // count
    return Shard(
        tensor=tensor,
        cut=Cut(dim=dim, size=size, stride=stride, rank=rank, projections=projections, replicas=replicas),
    )


def _padded_shard(tensor: torch.Tensor, dim: int, padded: int, size: int | None, *, rank: int, count: int) -> Shard:
    """The shard of a parameter whose whole SGLang has padded from `size` to `padded`; None: it has not.

    SGLang keeps zeros in the padding, which nothing here writes.
    """
    if size is None or size == padded:
        return _shard(tensor, dim=dim, size=padded, rank=rank, count=count)
    if count == 1:
        return Shard(tensor=tensor.narrow(dim, 0, size))
    cut = Cut(dim=dim, size=size, stride=padded // count, rank=rank)
    return Shard(tensor=tensor.narrow(dim, 0, cut.length), cut=cut)


def _of_embedding(owner: Any, tensor: torch.Tensor) -> Shard:
    """Return the shard of an embedding, whose rows SGLang pads, those of vision positions included."""
    rows = owner.org_vocab_size
    if owner.tp_size == 1:
        return Shard(tensor=tensor[:rows])
    indices = owner.shard_indices
    cut = Cut(dim=0, size=rows, stride=indices.num_org_elements_padded, rank=_rank_and_count(owner)[0])
    return Shard(tensor=tensor[: cut.length], cut=cut)


def _of_heads(owner: Any, tensor: torch.Tensor, num_names: int) -> list[Shard]:
    """Return shards of queries, keys and values. With fewer key heads than processes, several hold the same shard."""
    from sglang.srt.distributed.utils import get_group_rank_size

    rank, count = _rank_and_count(owner)
    kv_rank, kv_count = get_group_rank_size(owner.kv_tp_group)
    replicas = owner.num_kv_head_replicas
    queries = owner.total_num_heads * owner.head_size
    keys = owner.total_num_kv_heads * owner.head_size
    values = owner.total_num_kv_heads * owner.v_head_size
    if num_names == 1:
        if count > 1 and not queries == keys == values:
            raise ValueError(
                f"queries, keys and values in one parameter have {queries}, {keys} and {values} rows, and only equal "
                "ones are divided among processes; set rollout.tensor_parallel = 1"
            )
        return [_shard(tensor, dim=0, size=queries + keys + values, rank=rank, count=count, projections=3)]
    tensors = tensor.split([owner.q_proj_shard_size, owner.kv_proj_shard_size, owner.v_proj_shard_size])
    of_kv = {"dim": 0, "rank": kv_rank // replicas, "count": kv_count // replicas, "replicas": replicas}
    return [
        _shard(tensors[0], dim=0, size=queries, rank=rank, count=count),
        _shard(tensors[1], size=keys, **of_kv),
        _shard(tensors[2], size=values, **of_kv),
    ]


def _of_experts(owner: Any, kind: str, tensor: torch.Tensor) -> Shard:
    """Return the shard of all experts' gate and up as one tensor, [E, 2I, H], or of their down, [E, H, I]."""
    rank, count = owner.moe_tp_rank, owner.moe_tp_size
    if owner.moe_ep_size > 1:
        if count > 1:
            raise ValueError(
                f"experts are divided among {owner.moe_ep_size} processes, and each of them among {count}; set "
                "rollout.expert_parallel to rollout.tensor_parallel, or leave it out"
            )
        rank, count = owner.moe_ep_rank, owner.moe_ep_size
        return _shard(tensor, dim=0, size=tensor.shape[0] * count, rank=rank, count=count)
    if kind == "w13_weight":
        return _shard(tensor, dim=1, size=tensor.shape[1] * count, rank=rank, count=count, projections=2)
    return _shard(tensor, dim=2, size=tensor.shape[2] * count, rank=rank, count=count)


def _rank_and_count(owner: Any) -> tuple[int, int]:
    """Return this process's number among those that share a layer, and their count."""
    from sglang.srt.distributed.utils import get_group_rank_size

    rank, count = get_group_rank_size(getattr(owner, "tp_group", None))
    return rank, count
