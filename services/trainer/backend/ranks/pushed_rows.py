"""Writes the weights that are pushed into memory of rank 0's process: each rank its own rows.

A rank that can open that memory writes straight into it, beside the others. One on another machine, or in another
container, sends its rows to rank 0 through the hosts' memory, after those of the ranks before it. Rows are rounded,
written and sent in parts of at most `MAX_BUCKET_BYTES`. Besides its shards a rank holds one such part on its device,
and two in its host's memory.
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
from penstock.weights.manifest import MAX_BUCKET_BYTES
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
    own: dict[int, _Part] = {}
    num_bytes = 0
    for name, weight in weights.items():
        assert isinstance(weight, DTensor), "every parameter is sharded"
        row_bytes = math.prod(weight.shape[1:]) * precisions[name].written.itemsize
        num_bytes += full_shape(weight, groups)[0] * row_bytes
        if _is_first_copy(weight):
            first = offsets[name] + own_rows(weight, groups).start * row_bytes
            own |= _parts(local_shard(weight), precisions[name], first)
    sizes = {offset: part.num_bytes for offset, part in own.items()}
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


class _Part(NamedTuple):
    """A part of the rows of a weight that this rank writes."""

    numbers: torch.Tensor
    """One dimension, contiguous."""
    precision: PushedPrecision

    @property
    def num_bytes(self) -> int:
        """Size of what is written."""
        return int(self.numbers.numel() * self.precision.written.itemsize)

    def rounded(self) -> torch.Tensor:
        """Return the bytes as they are pushed, uint8[bytes], in the host's memory."""
        return self.precision.apply(self.numbers).cpu().view(torch.uint8)


def _parts(shard: torch.Tensor, precision: PushedPrecision, first: int) -> dict[int, _Part]:
    """Return the parts of this rank's rows of a weight by offset, in bytes, given that of the first one."""
    most = MAX_BUCKET_BYTES // precision.written.itemsize
    parts = shard.detach().view(-1).split(most) if shard.numel() else ()
    return {
        first + number * most * precision.written.itemsize: _Part(part, precision) for number, part in enumerate(parts)
    }


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


def _send(own: Mapping[int, _Part], ranks: Ranks) -> None:
    """Send this rank's rows to rank 0, which waits for all of them: also after one of them has failed."""
    failures: list[Exception] = []
    for part in own.values():
        data = torch.empty(part.num_bytes, dtype=torch.uint8)
        with _kept(failures):
            data = part.rounded()
        ranks.send(data)
    _raise_first(failures)


def _write(
    own: Mapping[int, _Part],
    sent: Sequence[Mapping[int, int]],
    writer: Writer,
    ranks: Ranks,
) -> None:
    """Write this rank's rows, and what others send; they wait until all is received, also after a failure.

    Args:
        own: Parts of its rows by offset.
        sent: Of each rank, the sizes in bytes of what it sends, by offset.
        writer: The open memory.
        ranks: All.
    """
    failures: list[Exception] = []
    with _kept(failures):
        for offset, part in own.items():
            writer.write(offset, part.rounded())
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
