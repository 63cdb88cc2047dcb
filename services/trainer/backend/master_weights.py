"""The float32 weights that AdamW updates: the policy's own parameters, or copies of them on the host.

Invariants: gradients are summed in float32, over all backward passes of a step. What AdamW updates is what checkpoints
and digests hold; what the device computes with is its value in the device's precision.

Names are transformers' own, which engines know; tied weights have one name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class MasterWeights:
    """The parameters themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take the float32 parameters of a transformers model; those with `requires_grad` are trained."""
        self._model = model
        self._masters: Mapping[str, torch.nn.Parameter] = dict(model.named_parameters())

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What AdamW updates. A step's gradient is in `grad` of each."""
        return {name: master for name, master in self._masters.items() if master.requires_grad}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, frozen ones included, in a fixed order."""
        for name, master in self._masters.items():
            yield name, master.detach()

    def updated(self) -> None:
        """Take note of an update."""

    def model_state(self) -> dict[str, Any] | None:
        """Return what to save under the names of the model's state; None for the model's own."""
        return None


class HostMasterWeights(MasterWeights):
    """float32 copies in the host's memory; the model keeps its parameters in the precision that it computes in.

    Each parameter's gradient moves to its copy as soon as a backward pass has computed it, so the device never holds
    the gradients of all.
    """

    def __init__(self, model: torch.nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the float32 parameters, and move the model's own to `device` in `dtype`."""
        super().__init__(model)
        self._parameters = self._masters
        self._masters = {
            name: torch.nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.to(device, dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(self._masters[name]))

    def updated(self) -> None:
        """Copy the trained weights to the device."""
        with torch.no_grad():
            for name, master in self.trained.items():
                self._parameters[name].copy_(master)

    def model_state(self) -> dict[str, Any]:
        """Return the model's state with the copies for its parameters; tied names share one."""
        masters = {id(self._parameters[name]): master.detach() for name, master in self._masters.items()}
        state = self._model.state_dict(keep_vars=True)
        return {name: masters.get(id(tensor), tensor) for name, tensor in state.items()}


def _moves_gradient_to(master: torch.nn.Parameter) -> Any:
    def move(parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad.to("cpu", torch.float32)
        if master.grad is None:
            master.grad = gradient
        else:
            master.grad += gradient
        parameter.grad = None

    return move
