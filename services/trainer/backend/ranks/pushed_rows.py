"""Writes the weights that are pushed into memory of rank 0's process: each rank its own rows.

A rank that can open that memory writes straight into it, beside the others. One on another machine, or in another
container, sends its rows to rank 0 through the hosts' memory, after those of the ranks before it. Besides its shards a
rank holds the rows of one weight, rounded as they are pushed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.shared_memory import Writer, writing_into
from services.trainer.backend.files.pushed_precision import PushedPrecision
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.sharding import full_shape, local_shard, own_rows


def write_rows(
    weights: Mapping[str, torch.Tensor],
    memory: rollout_pb2.SharedMemorySource,
    offsets: Mapping[str, int],
    *,
    precisions: Mapping[str, PushedPrecision],
    ranks: Ranks,
    groups: ExpertGroups | None,
) -> None:
    """Write all ranks' rows; return when the last rank has. All must call this together.

    Args:
        weights: Parameters of a sharded model by name.
        memory: Memory of rank 0's process.
        offsets: Where each weight begins, in bytes.
        precisions: Of each weight.
        ranks: All.
        groups: Those that the policy was sharded with.

    Raises:
        OSError: this rank could not write.
        RuntimeError: another rank could not, or the weights do not fill their memory.
    """
    own: dict[int, _Rows] = {}
    num_bytes = 0
    for name, weight in weights.items():
        assert isinstance(weight, DTensor), "every parameter is sharded"
        row_bytes = math.prod(weight.shape[1:]) * precisions[name].written.itemsize
        num_bytes += full_shape(weight, groups)[0] * row_bytes
        shard = local_shard(weight)
        if shard.numel() and _is_first_copy(weight):
            own[offsets[name] + own_rows(weight, groups).start * row_bytes] = _Rows(shard, precisions[name])
    sizes = {offset: rows.num_bytes for offset, rows in own.items()}
    with ExitStack() as stack:
        writer = ranks.on_each(partial(_open, memory, stack, ranks))
        sent = ranks.gather(sizes if writer is None else {})
        if writer is None:
            ranks.on_each(partial(_send, own, ranks))
        else:
            ranks.on_each(partial(_write, own, sent if ranks.rank == 0 else (), writer, ranks))
    written = sum(ranks.gather(sum(sizes.values())))
    if written != num_bytes:
        raise RuntimeError(f"ranks wrote {written} of {num_bytes} bytes of weights")


class _Rows(NamedTuple):
    """Rows of a weight that this rank writes."""

    shard: torch.Tensor
    precision: PushedPrecision

    @property
    def num_bytes(self) -> int:
        """Size of what is written."""
        return int(self.shard.numel() * self.precision.written.itemsize)

    def rounded(self) -> torch.Tensor:
        """Return the bytes as they are pushed, uint8[bytes], in the host's memory."""
        return self.precision.apply(self.shard.detach()).cpu().contiguous().view(-1).view(torch.uint8)


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


def _send(own: Mapping[int, _Rows], ranks: Ranks) -> None:
    """Send this rank's rows to rank 0, which waits for all of them: also after one of them has failed."""
    failures: list[Exception] = []
    for rows in own.values():
        data = torch.empty(rows.num_bytes, dtype=torch.uint8)
        with _kept(failures):
            data = rows.rounded()
        ranks.send(data)
    _raise_first(failures)


def _write(
    own: Mapping[int, _Rows],
    sent: Sequence[Mapping[int, int]],
    writer: Writer,
    ranks: Ranks,
) -> None:
    """Write this rank's rows, and what others send; they wait until all is received, also after a failure.

    Args:
        own: Rows by offset.
        sent: Of each rank, the sizes in bytes of what it sends, by offset.
        writer: The open memory.
        ranks: All.
    """
    failures: list[Exception] = []
    with _kept(failures):
        for offset, rows in own.items():
            writer.write(offset, rows.rounded())
    for rank, sizes in enumerate(sent):
        for offset, num_bytes in sizes.items():
            data = torch.empty(num_bytes, dtype=torch.uint8)
            ranks.receive(data, rank)
            with _kept(failures):
                writer.write(offset, data)
    _raise_first(failures)


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
