"""Writes the weights that are pushed into memory of rank 0's host: each rank its own rows, and none a whole tensor.

A rank that can open that memory writes straight into it. One on another machine sends its rows to rank 0, which writes
them. Besides its shards a rank holds the rows of one weight, rounded as they are pushed.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Replicate

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.shared_memory import Writer, writing_into
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.sharding import full_shape, held_of, local_shard


def write_rows(
    weights: Mapping[str, torch.Tensor],
    memory: rollout_pb2.SharedMemorySource,
    offsets: Mapping[str, int],
    *,
    dtype: torch.dtype,
    ranks: Ranks,
    groups: ExpertGroups | None,
) -> None:
    """Write all ranks' rows; return when the last rank has. All must call this together.

    Args:
        weights: Parameters of a sharded model by name.
        memory: Memory of rank 0's process.
        offsets: Where each weight begins, in bytes.
        dtype: The weights are written in it.
        ranks: All.
        groups: Those that the policy was sharded with.

    Raises:
        OSError: this rank could not write.
        RuntimeError: another rank could not, or the weights do not fill their memory.
    """
    own = {
        offsets[name] + _first_byte(weight, dtype, groups): local_shard(weight)
        for name, weight in weights.items()
        if _is_first_copy(weight, ranks) and local_shard(weight).numel()
    }
    sizes = {offset: shard.numel() * dtype.itemsize for offset, shard in own.items()}
    with ExitStack() as stack:
        writer = ranks.on_each(partial(_open, memory, stack, ranks))
        sent = ranks.gather(sizes if writer is None else {})

        def pass_on() -> None:
            for offset, shard in own.items():
                if writer is None:
                    ranks.send(_rounded(shard, dtype))
                else:
                    writer.write(offset, _rounded(shard, dtype))
            if writer is not None and ranks.rank == 0:
                _receive(sent, writer, ranks)

        ranks.on_each(pass_on)
    written = sum(sum(of_rank.values()) for of_rank in ranks.gather(sizes))
    wanted = sum(math.prod(full_shape(weight, groups)) * dtype.itemsize for weight in weights.values())
    if written != wanted:
        raise RuntimeError(f"ranks wrote {written} of {wanted} bytes of weights")


def _open(memory: rollout_pb2.SharedMemorySource, stack: ExitStack, ranks: Ranks) -> Writer | None:
    """Open the memory; return None on another machine."""
    try:
        return stack.enter_context(writing_into(memory))
    except NotReadyError:
        if ranks.rank == 0:
            raise
        return None


def _is_first_copy(weight: torch.Tensor, ranks: Ranks) -> bool:
    """Return whether this rank writes its shard: of ranks that hold the same one, one does."""
    if not isinstance(weight, DTensor):
        return ranks.rank == 0
    place = weight.device_mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh of what it holds"
    return not any(
        number for number, placement in zip(place, weight.placements, strict=True) if placement == Replicate()
    )


def _first_byte(weight: torch.Tensor, dtype: torch.dtype, groups: ExpertGroups | None) -> int:
    """Return where this rank's rows begin in a weight."""
    num_bytes: int = held_of(weight, groups).start * math.prod(weight.shape[1:]) * dtype.itemsize
    return num_bytes


def _rounded(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the shard's bytes as they are pushed, uint8[bytes], in the host's memory."""
    return shard.detach().to(dtype).cpu().contiguous().view(-1).view(torch.uint8)


def _receive(sent: Sequence[Mapping[int, int]], writer: Writer, ranks: Ranks) -> None:
    """Write what ranks of other machines send."""
    for rank, sizes in enumerate(sent):
        for offset, num_bytes in sizes.items():
            data = torch.empty(num_bytes, dtype=torch.uint8)
            ranks.receive(data, rank)
            writer.write(offset, data)
