"""Writes the weights that are pushed into memory of rank 0's process: each rank its own rows.

A rank that can open that memory writes straight into it, beside the others. One on another machine, or in another
container, sends its rows to rank 0 through the hosts' memory, after those of the ranks before it. Besides its shards a
rank holds the rows of one weight, rounded as they are pushed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Replicate

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.shared_memory import Writer, writing_into
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.sharding import full_shape, local_shard, own_rows


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
    own: dict[int, torch.Tensor] = {}
    num_bytes = 0
    for name, weight in weights.items():
        assert isinstance(weight, DTensor), "every parameter is sharded"
        row_bytes = math.prod(weight.shape[1:]) * dtype.itemsize
        num_bytes += full_shape(weight, groups)[0] * row_bytes
        shard = local_shard(weight)
        if shard.numel() and _is_first_copy(weight):
            own[offsets[name] + own_rows(weight, groups).start * row_bytes] = shard
    sizes = {offset: shard.numel() * dtype.itemsize for offset, shard in own.items()}
    with ExitStack() as stack:
        writer = ranks.on_each(partial(_open, memory, stack, ranks))
        sent = ranks.gather(sizes if writer is None else {})
        if writer is None:
            ranks.on_each(partial(_send, own, dtype, ranks))
        else:
            ranks.on_each(partial(_write, own, sent if ranks.rank == 0 else (), writer, dtype, ranks))
    written = sum(ranks.gather(sum(sizes.values())))
    if written != num_bytes:
        raise RuntimeError(f"ranks wrote {written} of {num_bytes} bytes of weights")


def _is_first_copy(weight: DTensor) -> bool:
    """Return whether this rank writes its shard: of replicas, which hold the same one, the first does."""
    place = weight.device_mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh of what it holds"
    return not any(
        number for number, placement in zip(place, weight.placements, strict=True) if placement == Replicate()
    )


def _open(memory: rollout_pb2.SharedMemorySource, stack: ExitStack, ranks: Ranks) -> Writer | None:
    """Open the memory; return None where it cannot be opened."""
    try:
        return stack.enter_context(writing_into(memory))
    except NotReadyError:
        if ranks.rank == 0:
            raise
        return None


def _send(own: Mapping[int, torch.Tensor], dtype: torch.dtype, ranks: Ranks) -> None:
    """Send this rank's rows to rank 0, which waits for all of them: also after one of them has failed."""
    failures: list[Exception] = []
    for shard in own.values():
        data = torch.empty(shard.numel() * dtype.itemsize, dtype=torch.uint8)
        with _kept(failures):
            data = _rounded(shard, dtype)
        ranks.send(data)
    _raise_first(failures)


def _write(
    own: Mapping[int, torch.Tensor],
    sent: Sequence[Mapping[int, int]],
    writer: Writer,
    dtype: torch.dtype,
    ranks: Ranks,
) -> None:
    """Write this rank's rows, and what others send; they wait until all is received, also after a failure.

    Args:
        own: Rows by offset.
        sent: Of each rank, the sizes in bytes of what it sends, by offset.
        writer: The open memory.
        dtype: Rows are written in it.
        ranks: All.
    """
    failures: list[Exception] = []
    with _kept(failures):
        for offset, shard in own.items():
            writer.write(offset, _rounded(shard, dtype))
    for rank, sizes in enumerate(sent):
        for offset, num_bytes in sizes.items():
            data = torch.empty(num_bytes, dtype=torch.uint8)
            ranks.receive(data, rank)
            with _kept(failures):
                writer.write(offset, data)
    _raise_first(failures)


def _rounded(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the shard's bytes as they are pushed, uint8[bytes], in the host's memory."""
    return shard.detach().to(dtype).cpu().contiguous().view(-1).view(torch.uint8)


@contextmanager
def _kept(failures: list[Exception]) -> Iterator[None]:
    """Keep a failure for later."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised when nobody waits any more
        failures.append(error)


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]
