"""Each tensor-parallel process's shards of the parameters.

SGLang divides most matrices among an engine's processes: by rows, by columns, or section by section where it fuses
several. Each process holds one shard, and several may hold the same shard of keys and values. Runs inside
SGLang's scheduler processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

_OF_VALUE_HEADS: Final = ("A_log", "dt_bias")
"""Parameters of linear attention with a value for each head of values. SGLang has them in the layer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One of several parts that follow each other in a parameter, each of which is divided separately."""

    size: int
    """Size of the whole section along the dimension that is divided."""
    stride: int
    """Distance between the starts of two shards. The last shards may be shorter, or empty."""

    def start_of(self, rank: int) -> int:
        """Return where the rank's shard begins in the section."""
        return min(rank * self.stride, self.size)

    def length_of(self, rank: int) -> int:
        """Return the length of the rank's shard."""
        return min(self.stride, self.size - self.start_of(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is divided: along one dimension, each of its sections separately."""

    dim: int
    sections: tuple[Section, ...]
    rank: int
    """Number of this process's shard."""
    replicas: int = 1
    """Number of adjacent processes that hold the same shard."""

    @property
    def size(self) -> int:
        """Size of the whole parameter along the dimension."""
        return sum(section.size for section in self.sections)

    @property
    def stride(self) -> int:
        """Length to which every shard is padded."""
        return sum(section.stride for section in self.sections)

    @property
    def length(self) -> int:
        """Length of this process's shard."""
        return sum(self.lengths_of(self.rank))

    def lengths_of(self, rank: int) -> list[int]:
        """Return the lengths of the rank's shard in each section."""
        return [section.length_of(rank) for section in self.sections]


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
        if cut is not None and self.tensor.shape[cut.dim] != cut.length:
            raise ValueError(
                f"SGLang's shard of a parameter has the shape {list(self.tensor.shape)}, which is not that of {cut}; "
                "choose a rollout.tensor_parallel that divides the model's sizes"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.tensor.shape) if self.cut is None else self._shape_with(self.cut.size)

    @property
    def whole_bytes(self) -> int:
        """Size of the whole parameter."""
        return math.prod(self.shape) * int(self.tensor.itemsize)

    @property
    def stride_bytes(self) -> int:
        """Size of a padded shard."""
        return math.prod(self._padded_shape()) * int(self.tensor.itemsize)

    def write(self, whole: torch.Tensor) -> None:
        """Copy this process's shard out of the whole parameter."""
        if self.cut is None:
            self.tensor.copy_(whole)
            return
        for mine, its in zip(self._by_section(), self.of_rank(self.cut.rank, whole), strict=True):
            mine.copy_(its)

    def of_rank(self, rank: int, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a rank's shard of each section of the whole, as views."""
        cut = self.cut
        assert cut is not None
        sections = whole.split([section.size for section in cut.sections], dim=cut.dim)
        return tuple(
            each.narrow(cut.dim, section.start_of(rank), section.length_of(rank))
            for each, section in zip(sections, cut.sections, strict=True)
        )

    def padded_into(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this process's shard with each section padded: this tensor, or a copy.

        Args:
            memory: uint8[at least `stride_bytes`] for the copy.
        """
        cut = self.cut
        assert cut is not None
        if cut.length == cut.stride and self.tensor.is_contiguous():
            return self.tensor
        padded = memory[: self.stride_bytes].view(self.tensor.dtype).view(self._padded_shape())
        for into, mine in zip(self.unpadded(padded, cut.rank), self._by_section(), strict=True):
            into.copy_(mine)
        return padded

    def unpadded(self, padded: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
        """Return each section of what `padded_into` returns on a rank, without the padding, as views."""
        cut = self.cut
        assert cut is not None
        sections = padded.split([section.stride for section in cut.sections], dim=cut.dim)
        return tuple(
            each.narrow(cut.dim, 0, length) for each, length in zip(sections, cut.lengths_of(rank), strict=True)
        )

    def _by_section(self) -> tuple[torch.Tensor, ...]:
        assert self.cut is not None
        sections: tuple[torch.Tensor, ...] = self.tensor.split(self.cut.lengths_of(self.cut.rank), dim=self.cut.dim)
        return sections

    def _padded_shape(self) -> tuple[int, ...]:
        assert self.cut is not None
        return self._shape_with(self.cut.stride)

    def _shape_with(self, size: int) -> tuple[int, ...]:
        """The tensor's shape with this size along the cut's dimension."""
        assert self.cut is not None
        before, after = self.tensor.shape[: self.cut.dim], self.tensor.shape[self.cut.dim + 1 :]
        return (*before, size, *after)


def shards_of(
    owner: Any,
    kind: str,
    tensor: torch.Tensor,
    num_names: int,
    *,
    inner_size: int | None = None,
    conv_channels: tuple[int, ...] = (),
) -> list[Shard]:
    """Take apart what SGLang stores as one parameter of a layer.

    Args:
        owner: The layer.
        kind: SGLang's name of the parameter: weight, bias.
        tensor: The parameter.
        num_names: Number of the trainer's parameters that it holds.
        inner_size: For a layer into or out of the middle of an MLP: the middle's size without SGLang's padding.
        conv_channels: For a convolution of linear attention: its channels of queries, of keys and of values.

    Raises:
        ValueError: its experts or its shape are not divided as SGLang divides them.
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
    if kind in _OF_VALUE_HEADS:
        return [_shard(tensor, 0, owner.num_v_heads, rank=owner.attn_tp_rank, count=owner.attn_tp_size)]
    rank, count = _rank_and_count(owner)
    if isinstance(owner, linear.MergedColumnParallelLinear):
        return _of_projections(owner.output_sizes, tensor, num_names, inner_size, rank=rank, count=count)
    if isinstance(owner, linear.ColumnParallelLinear):
        return [_shard(tensor, 0, *(conv_channels or (owner.output_size,)), rank=rank, count=count)]
    if isinstance(owner, linear.RowParallelLinear) and kind == "weight":
        return [_padded_shard(tensor, 1, owner.input_size, inner_size, rank=rank, count=count)]
    return [Shard(tensor=tensor)]


def _of_projections(
    sizes: Sequence[int], tensor: torch.Tensor, num_names: int, inner_size: int | None, *, rank: int, count: int
) -> list[Shard]:
    """Return shards of projections that SGLang fuses; the trainer's first parameter may be several of them."""
    num_in_first = len(sizes) - num_names + 1
    by_name = [tuple(sizes[:num_in_first]), *((size,) for size in sizes[num_in_first:])]
    tensors = tensor.split([sum(each) // count for each in by_name])
    return [
        _padded_shard(part, 0, each[0], inner_size, rank=rank, count=count)
        if len(each) == 1
        else _shard(part, 0, *each, rank=rank, count=count)
        for part, each in zip(tensors, by_name, strict=True)
    ]


def _shard(tensor: torch.Tensor, dim: int, *sizes: int, rank: int, count: int, replicas: int = 1) -> Shard:
    """The shard of a parameter whose sections have these sizes."""
    if count == 1:
        return Shard(tensor=tensor)
    sections = tuple(Section(size=size, stride=size // count) for size in sizes)
    return Shard(tensor=tensor, cut=Cut(dim=dim, sections=sections, rank=rank, replicas=replicas))


def _padded_shard(tensor: torch.Tensor, dim: int, padded: int, size: int | None, *, rank: int, count: int) -> Shard:
    """The shard of a parameter whose whole SGLang has padded from `size` to `padded`; None: it has not.

    SGLang keeps zeros in the padding, which nothing here writes.
    """
    if size is None or size == padded:
        return _shard(tensor, dim, padded, rank=rank, count=count)
    if count == 1:
        return Shard(tensor=tensor.narrow(dim, 0, size))
    cut = Cut(dim=dim, sections=(Section(size=size, stride=padded // count),), rank=rank)
    return Shard(tensor=tensor.narrow(dim, 0, cut.length), cut=cut)


def _of_embedding(owner: Any, tensor: torch.Tensor) -> Shard:
    """Return the shard of an embedding, whose rows SGLang pads, those of vision positions included."""
    rows = owner.org_vocab_size
    if owner.tp_size == 1:
        return Shard(tensor=tensor[:rows])
    section = Section(size=rows, stride=owner.shard_indices.num_org_elements_padded)
    cut = Cut(dim=0, sections=(section,), rank=_rank_and_count(owner)[0])
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
        return [_shard(tensor, 0, queries, keys, values, rank=rank, count=count)]
    tensors = tensor.split([owner.q_proj_shard_size, owner.kv_proj_shard_size, owner.v_proj_shard_size])
    of_kv = {"rank": kv_rank // replicas, "count": kv_count // replicas, "replicas": replicas}
    return [
        _shard(tensors[0], 0, queries, rank=rank, count=count),
        _shard(tensors[1], 0, keys, **of_kv),
        _shard(tensors[2], 0, values, **of_kv),
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
        return _shard(tensor, 0, tensor.shape[0] * count, rank=rank, count=count)
    if kind == "w13_weight":
        half = tensor.shape[1] * count // 2
        return _shard(tensor, 1, half, half, rank=rank, count=count)
    return _shard(tensor, 2, tensor.shape[2] * count, rank=rank, count=count)


def _rank_and_count(owner: Any) -> tuple[int, int]:
    """Return this process's number among those that share a layer, and their count."""
    from sglang.srt.distributed.utils import get_group_rank_size

    rank, count = get_group_rank_size(getattr(owner, "tp_group", None))
    return rank, count
