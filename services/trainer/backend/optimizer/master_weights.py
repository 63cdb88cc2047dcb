"""The float32 weights that AdamW updates: the policy's own parameters, shards of them, or copies.

Invariants: gradients are summed in float32, over all backward passes of a step. Checkpoints and digests hold the
weights that AdamW updates; the device computes with their values in its own precision.

Names are transformers' own, which engines know; tied weights have one name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.gathering import gather_to_owners
from services.trainer.backend.ranks.sharding import (
    full_shape,
    full_tensor,
    local_shard,
    local_shard_like,
    read_shard,
)


class MasterWeights:
    """The master weights of one process: the model's own parameters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take float32 parameters of a transformers model by name: those that checkpoints hold.

        Of these, the ones with `requires_grad` are trained.
        """
        self._masters = dict(parameters)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The weights that AdamW updates. A step's gradient is in `grad` of each."""
        return {name: master for name, master in self._masters.items() if master.requires_grad}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, frozen ones included, in a fixed order."""
        for name, master in self._masters.items():
            yield name, master.detach()

    def full_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter of the model, all ranks' parts of it together."""
        return tuple(parameter.shape)

    def full_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return all of a parameter of the model; many ranks must ask for the same ones in the same order."""
        return parameter

    def updated(self) -> None:
        """Handle an update of the weights."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, in full, in a fixed order."""
        return {name: tuple(master.shape) for name, master in self._masters.items()}

    @property
    def shards(self) -> dict[str, torch.Tensor]:
        """This rank's shard of every weight."""
        return {name: master.detach() for name, master in self._masters.items()}

    def owned(self, shards: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return what this rank owns of full tensors, such as averages, that are shaped like the weights.

        Args:
            shards: This rank's shard of each, by the name of the weight.
            owners: The rank that owns each.
        """
        return dict(shards)

    def local_shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor shaped like the weight `name`."""
        return full

    def read_shard(self, name: str, read: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return this rank's shard of a stored tensor shaped like the weight `name`, given a reader of its rows."""
        return read(slice(None))


class ShardedMasterWeights(MasterWeights):
    """This rank's shards of the parameters of a model that many ranks hold together.

    `trained` holds the shards. All ranks must call `named` and `owned` together, because these return full tensors.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], groups: ExpertGroups | None = None) -> None:
        """Take float32 parameters of a sharded model.

        Args:
            parameters: The parameters by name.
            groups: Those of expert parallelism that the model was sharded with.
        """
        super().__init__(parameters)
        self._groups = groups
        self._parameters = self._masters
        self._masters = {
            name: torch.nn.Parameter(local_shard(parameter.detach()), requires_grad=parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(self._masters[name]))

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight in full."""
        for name, parameter in self._parameters.items():
            yield name, self.full_tensor(parameter.detach())

    def full_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter of the model, all ranks' parts of it together."""
        return full_shape(parameter, self._groups)

    def full_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return all of a parameter of the model; all ranks must ask for the same ones in the same order."""
        return full_tensor(parameter, self._groups)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, in full, in a fixed order."""
        return {name: self.full_shape(parameter) for name, parameter in self._parameters.items()}

    def owned(self, shards: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return copies in the host's memory of the full tensors that this rank owns."""
        return gather_to_owners(shards, self._parameters, owners, self._groups)

    def local_shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor shaped like the weight `name`."""
        return local_shard_like(full, self._parameters[name], self._groups)

    def read_shard(self, name: str, read: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Return this rank's shard of a stored tensor; rows of other ranks are not read."""
        return read_shard(self._parameters[name], read, self._groups)

    @contextmanager
    def replaced_by(self, shards: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Make the model compute with other weights, given this rank's shard of each, within the context."""
        own = {name: master.detach().clone() for name, master in self._masters.items()}
        self._write(shards)
        try:
            yield
        finally:
            self._write(own)

    def _write(self, shards: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(shards[name])


class CopiedMasterWeights(MasterWeights):
    """float32 copies, on the device or the host; the model keeps its parameters in the precision that it computes in.

    So they are rounded once an update, as engines round them, and what layers pass on has their precision too. Each
    parameter's gradient moves to its copy as soon as a backward pass has computed it: with copies on the host, the
    device never holds all gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        device: torch.device,
        dtype: torch.dtype,
        copies_on: torch.device,
    ) -> None:
        """Copy float32 parameters to `copies_on`, and move the model's own to `device` in `dtype`."""
        super().__init__(parameters)
        self._parameters = self._masters
        self._masters = {
            name: torch.nn.Parameter(parameter.detach().to(copies_on, copy=True), requires_grad=parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.to(device, dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(self._masters[name]))

    def updated(self) -> None:
        """Round the trained weights into the model."""
        trained = self.trained
        with torch.no_grad():
            torch._foreach_copy_([self._parameters[name] for name in trained], list(trained.values()))


def _moves_gradient_to(master: torch.nn.Parameter) -> Any:
    def move(parameter: torch.nn.Parameter) -> None:
        gradient = local_shard(parameter.grad)
        if master.grad is None:
            master.grad = gradient.to(master.device, torch.float32)
        else:
            master.grad += gradient.to(master.device)
        parameter.grad = None

    return move
