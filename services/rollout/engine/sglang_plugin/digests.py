"""Computes digests of an engine's parameters. Its processes take turns to put together the parameters they share.

SGLang's processes answer together: if one raised alone, the others would wait in a collective until its timeout. So
memory is allocated before the first collective, and all processes raise an error of one. Runs inside SGLang's scheduler
processes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from penstock.weights.digest import tensor_digest, tensor_digests
from services.rollout.engine.sglang_plugin.parameters import trainer_parameters
from services.rollout.engine.sglang_plugin.shards import Shard

_T = TypeVar("_T")


def digests_of(model: Any, kind: str) -> dict[str, str]:
    """Return digests as text by the trainer's names: of all unshared parameters, and of this process's shared ones.

    Every process must call it.

    Raises:
        RuntimeError: a process could not read or put together its parameters; all raise it.
    """
    shards = dict(trainer_parameters(model))
    own = {name: shard.tensor for name, shard in shards.items() if shard.cut is None}
    shared = {name: shard for name, shard in shards.items() if shard.cut is not None}
    if not shared:
        found = tensor_digests(own.items(), kind)
    else:
        from sglang.srt.distributed import get_tp_group

        groups = get_tp_group()
        agree = Agreement(groups.cpu_group)
        found = agree.on(lambda: tensor_digests(own.items(), kind))
        found |= shared_digests(shared, kind, groups.device_group, agree)
    return {name: str(digest) for name, digest in found.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Makes a failure of one engine process fail all of them."""

    group: dist.ProcessGroup
    """A process group on CPUs."""

    def on(self, work: Callable[[], _T]) -> _T:
        """Do work that uses no collective, and wait for the other processes.

        Raises:
            RuntimeError: it failed on some process.
        """
        try:
            done, reason = work(), None
        except Exception as error:  # noqa: BLE001 - raised below, by all
            reason = f"process {dist.get_rank(self.group)}: {type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(reasons, reason, group=self.group)
        if failed := [each for each in reasons if each is not None]:
            raise RuntimeError("; ".join(failed))
        return done


def shared_digests(
    shards: Mapping[str, Shard], kind: str, group: dist.ProcessGroup, agree: Agreement
) -> dict[str, int]:
    """Return the digests of the parameters that this process puts together.

    Raises:
        RuntimeError: memory ran out, or a digest failed, on some process.
    """
    memory = agree.on(lambda: GatherMemory.of(shards.values(), group))
    digests: dict[str, int] = {}
    errors: list[Exception] = []
    for number, (name, shard) in enumerate(shards.items()):
        parts = memory.gather(shard, number % dist.get_world_size(group))
        if parts is None or errors:
            continue
        try:
            digests[name] = tensor_digest(memory.put_together(shard, parts), kind)
        except Exception as error:  # noqa: BLE001 - raised below, when the others are through
            errors.append(error)

    def result() -> dict[str, int]:
        for error in errors:
            raise error
        return digests

    return agree.on(result)


@dataclasses.dataclass(frozen=True, slots=True)
class GatherMemory:
    """Buffers for one parameter at a time, uint8[bytes] each."""

    group: dist.ProcessGroup
    sent: torch.Tensor
    """Room for a shard of the largest parameter."""
    received: torch.Tensor
    """Room for all its shards."""
    whole: torch.Tensor

    @classmethod
    def of(cls, shards: Iterable[Shard], group: dist.ProcessGroup) -> Self:
        """Allocate for the largest of these shared parameters: twice the parameter, and a shard."""
        shards = list(shards)
        sent = max(shard.stride_bytes for shard in shards)
        whole = max(shard.whole_bytes for shard in shards)
        device = shards[0].tensor.device
        memory = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size in (sent, sent * dist.get_world_size(group), whole)
        ]
        return cls(group, *memory)

    def gather(self, shard: Shard, to_rank: int) -> tuple[torch.Tensor, ...] | None:
        """Gather the shards of all processes on `to_rank`, each as long as the longest; return None on the other ranks.

        All must call it.
        """
        sent = shard.padded_into(self.sent)
        if dist.get_rank(self.group) != to_rank:
            dist.gather(sent, None, group=self.group, group_dst=to_rank)
            return None
        received = self.received[: shard.stride_bytes * dist.get_world_size(self.group)].split(shard.stride_bytes)
        parts = tuple(part.view(sent.dtype).view(sent.shape) for part in received)
        dist.gather(sent, list(parts), group=self.group, group_dst=to_rank)
        return parts

    def put_together(self, shard: Shard, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the whole parameter, valid until the next call.

        If processes that should hold the same shard differ, return all shards, whose digest matches no parameter.
        """
        cut = shard.cut
        assert cut is not None
        whole = self.whole[: shard.whole_bytes].view(shard.tensor.dtype).view(shard.shape)
        for number, part in enumerate(parts):
            rank, replica = divmod(number, cut.replicas)
            for held, place in zip(shard.unpadded(part, rank), shard.of_rank(rank, whole), strict=True):
                if replica == 0:
                    place.copy_(held)
                elif not torch.equal(_bytes(held), _bytes(place)):
                    return torch.stack(parts)
        return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, because 0 and -0 are equal as numbers."""
    return tensor.contiguous().view(-1).view(torch.uint8)
