"""Sends shards to the rank that writes the whole tensor, in rounds in which every rank receives one.

So a checkpoint passes each rank's link once and lies in each host's memory once, however many ranks there are. Divided
experts are the exception: every rank gathers them, one tensor at a time, and their owner keeps them.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from services.trainer.backend.files.file_plan import rounds_of_owners
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.sharding import full_like, held_rows, row_mesh


def gather_to_owners(
    shards: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    owners: Mapping[str, int],
    groups: ExpertGroups | None = None,
) -> dict[str, torch.Tensor]:
    """Return the whole tensors that this rank owns, in the host's memory, as copies.

    All ranks must call this together. A rank's device holds one whole tensor at a time.

    Args:
        shards: This rank's shard of each tensor, by name.
        parameters: The parameters that the tensors are shaped and sharded like.
        owners: The rank that gets each tensor.
        groups: Those of expert parallelism; experts are gathered on every rank, and kept by their owner.
    """
    owned: dict[str, torch.Tensor] = {}
    for names in rounds_of_owners({name: owners[name] for name in shards}):
        operations: list[dist.P2POp] = []
        received: list[tuple[str, torch.Tensor]] = []
        for name in names:
            whole = _exchange(shards[name], parameters[name], owners[name], operations, groups)
            if owners[name] == dist.get_rank():
                received.append((name, whole))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        owned |= {name: whole.to("cpu") for name, whole in received}
    return {name: owned[name] for name in shards if name in owned}


def _exchange(
    shard: torch.Tensor,
    parameter: torch.Tensor,
    owner: int,
    operations: list[dist.P2POp],
    groups: ExpertGroups | None,
) -> torch.Tensor:
    """Add what this rank sends or receives of a tensor to `operations`; return what the owner will have whole."""
    mesh = row_mesh(parameter, groups)
    if mesh is None:
        return full_like(shard, parameter, groups).clone()
    assert isinstance(parameter, DTensor), "only what is sharded has a mesh"
    device = torch.device(mesh.device_type)
    group, rank = mesh.get_group(), dist.get_rank()
    members = dist.get_process_group_ranks(group)
    if owner not in members:  # another copy of the weights sends it
        return shard
    if owner != rank:
        if shard.numel():
            operations.append(dist.P2POp(dist.isend, shard.to(device).contiguous(), owner, group))
        return shard
    whole = torch.empty(parameter.shape, dtype=shard.dtype, device=device)
    for number, member in enumerate(members):
        rows = whole[held_rows(parameter.shape[0], number, len(members))]
        if member == rank:
            rows.copy_(shard)
        elif rows.numel():
            operations.append(dist.P2POp(dist.irecv, rows, member, group))
    return whole
