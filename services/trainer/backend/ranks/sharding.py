"""Shards of weights: each rank holds an equal part of every parameter, and whole ones only while it computes with them.

torch's `fully_shard` does this by units: a unit's parameters are gathered before its forward pass and again before its
backward pass, which sums their gradient over the ranks and leaves each with its shard. Units are the text's layers, and
everything else as one: embedding, tower, norm and head. So a rank whose row has no picture gathers the tower too,
and no rank waits for another.

With replicas (HSDP) a group of neighbouring ranks holds shards of all weights: they gather and sum among themselves,
and then each sums its shard of the gradient with the ranks that hold the same one. So all replicas stay equal.
With expert parallelism the experts of a layer are a unit of their own, which only the ranks that own them share
(`expert_groups`). Their gradient already covers the tokens of all ranks that exchange tokens; then it is summed over
the ranks that share them. Together these are all ranks.

Invariant: gradients are plain sums over ranks. Weights of tokens are the whole batch's, so no factor of the number of
ranks appears anywhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.errors import ConfigError
from services.trainer.backend.policy.experts.expert_dispatch import divide_experts
from services.trainer.backend.ranks.expert_groups import ExpertGroups


def shard(
    policy: Any,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None,
    offload: bool = False,
    groups: ExpertGroups | None = None,
) -> None:
    """Leave this rank its shard of every parameter of the policy.

    Args:
        policy: A `PolicyModel` with float32 parameters, frozen ones in any precision: on the meta device, for
            `give_weights`; or the same on every rank, and then they move to the mesh's device.
        mesh: All ranks; a second dimension, the first, has the replicas.
        dtype: Parameters are gathered and computed with in it; shards and sums of gradients stay float32. None: in
            their own.
        offload: Keep shards and gradients in the host's memory; a unit's shards move to the device when it is gathered.
        groups: Those of expert parallelism; None: each rank has a shard of every expert.

    Raises:
        ConfigError: torch is too old to sum gradients of which only some ranks have all.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"trainer.ranks: several ranks need torch 2.14, and {torch.__version__} is installed; update it"
        )
    # Otherwise what a frozen embedding feeds needs a gradient in rows with pictures only, and ranks would not go
    # backward through the same layers.
    policy.model.enable_input_require_grads()
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype is torch.float32 else dtype,  # None casts nothing
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    }
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    of_one_rank: list[Any] = []
    if groups is not None:
        for experts in divide_experts(policy, groups):
            fully_shard(experts, mesh=groups.mesh, **settings)
            if groups.mesh.size() == 1:
                of_one_rank.append(experts)
    for layer in policy.text_layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(policy, mesh=mesh, **settings)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if module not in of_one_rank:  # of which torch would make a further copy, to divide it
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # only NCCL can divide while it sums
            module.set_reduce_scatter_unused_params(True)  # the tower, in a row without pictures


def forget_gathered(policy: Any) -> None:
    """Drop what forward passes have gathered that no backward pass followed: the weights may change before the next."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_shape(tensor: torch.Tensor, groups: ExpertGroups | None) -> tuple[int, ...]:
    """Return the shape of `full_tensor`, without asking other ranks."""
    shape = tuple(tensor.shape)
    return (groups.size * shape[0], *shape[1:]) if groups is not None and groups.are_of(tensor) else shape


def full_tensor(tensor: torch.Tensor, groups: ExpertGroups | None = None) -> torch.Tensor:
    """Return all of a tensor. Every rank must ask for the same tensors in the same order.

    Args:
        tensor: A parameter, or one shaped and sharded like it.
        groups: Those that the policy was sharded with.
    """
    return full_like(local_shard(tensor), tensor, groups)


def row_mesh(parameter: torch.Tensor, groups: ExpertGroups | None = None) -> DeviceMesh | None:
    """Return the ranks that share the rows of a parameter, of which each rank holds as `held_rows` says.

    None: no other rank has rows of it, shards are not rows, or other ranks have other experts of it.
    """
    if not isinstance(parameter, DTensor) or (groups is not None and groups.are_of(parameter)):
        return None
    mesh = parameter.device_mesh
    sharded = [number for number, placement in enumerate(parameter.placements) if placement != Replicate()]
    if [parameter.placements[number] for number in sharded] != [Shard(0)]:
        return None
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[sharded[0]]]


def read_shard(
    parameter: torch.Tensor, read: Callable[[slice], torch.Tensor], groups: ExpertGroups | None = None
) -> torch.Tensor:
    """Return this rank's shard of a tensor shaped like a parameter; rows of other ranks are not read.

    Args:
        parameter: A parameter of a sharded model; only its shape counts.
        read: Returns rows of the tensor, which is all ranks' together.
        groups: Those that the policy was sharded with.
    """
    if not isinstance(parameter, DTensor):
        return read(slice(None))
    return read(own_rows(parameter, groups))


def own_rows(parameter: DTensor, groups: ExpertGroups | None = None) -> slice:
    """Return which rows of a parameter, all ranks' together, this rank holds.

    Args:
        parameter: A parameter of a sharded model; only its shape counts.
        groups: Those that the policy was sharded with.
    """
    num_rows, first = parameter.shape[0], 0
    mesh: DeviceMesh | None = parameter.device_mesh
    if groups is not None and groups.are_of(parameter):
        first = groups.number * num_rows
    else:
        mesh = row_mesh(parameter, groups)
    assert mesh is not None, "every parameter is cut into rows"
    held = held_rows(num_rows, mesh.get_local_rank(), mesh.size())
    return slice(first + held.start, first + held.stop)


def give_weights(
    model: torch.nn.Module, read: Callable[[str, slice], torch.Tensor], groups: ExpertGroups | None = None
) -> None:
    """Give a sharded model on the meta device this rank's shards of its weights, one after the other.

    Args:
        model: The transformers model of a sharded policy.
        read: Returns rows of a weight, in float32, given its name; they are rounded to the parameter's precision.
        groups: Those that the policy was sharded with.
    """
    holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, attribute))
    for name, parameter in list(model.named_parameters()):
        assert isinstance(parameter, DTensor), "every parameter is sharded"
        placed = DTensor.from_local(
            read_shard(parameter, partial(read, name), groups).to(
                torch.device(parameter.device_mesh.device_type), parameter.dtype
            ),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        weight = torch.nn.Parameter(placed, requires_grad=parameter.requires_grad)
        for module, attribute in holders[id(parameter)]:  # several hold a tied one
            # torch then takes it for its shard, and moves it to the host's memory if weights are offloaded.
            module.load_state_dict({attribute: weight}, strict=False, assign=True)


def held_rows(num_rows: int, number: int, num_holders: int) -> slice:
    """Return the rows that one of several holders has: equally many each, the last ones fewer or none.

    Args:
        num_rows: Rows of the tensor.
        number: Number of the holder.
        num_holders: How many there are.
    """
    most = -(-num_rows // num_holders)
    return slice(min(number * most, num_rows), min((number + 1) * most, num_rows))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a copy."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
    return tensor


def full_like(shard: torch.Tensor, parameter: torch.Tensor, groups: ExpertGroups | None) -> torch.Tensor:
    """Return all of a tensor of which every rank holds the shard that it holds of `parameter`."""
    if isinstance(parameter, DTensor):
        placed = DTensor.from_local(
            shard.to(torch.device(parameter.device_mesh.device_type)),  # from the host's memory, if it is offloaded
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole: torch.Tensor = placed.full_tensor()
        return groups.gathered(whole) if groups is not None and groups.are_of(parameter) else whole
    return shard


def local_shard_like(tensor: torch.Tensor, parameter: torch.Tensor, groups: ExpertGroups | None) -> torch.Tensor:
    """Return of a tensor, which every rank has, the shard that this rank holds of `parameter`."""
    if isinstance(parameter, DTensor):
        if groups is not None and groups.are_of(parameter):
            tensor = groups.own(tensor)
        placed = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return local_shard(placed).clone()
    return tensor
