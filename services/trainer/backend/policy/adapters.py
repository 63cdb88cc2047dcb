"""Low-rank adapters (LoRA) in the policy's linear layers.

Legend: R = rank, I = inputs of a layer, O = its outputs.

A layer with an adapter computes with its merged matrix, W + alpha / rank * B A, rounded once to the precision that the
policy computes in. Engines merge the same way, so in bfloat16, too, the two differ no more than with whole weights.
The gradient of A and B passes through their thin products; the gradient of W is never computed.

B begins at zero, so the policy begins as the model in its folder, and that model is the policy with its adapters off.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from penstock.weights.adapter_names import LORA_A, LORA_B, is_adapter
from penstock.weights.adapters import ADAPTER_DTYPE, change_of, merged
from penstock.weights.manifest import TensorSpec
from services.trainer.checks.parameter_patterns import adapted_layers
from services.trainer.config import LoraConfig


class AdaptedLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with an adapter. Its own matrix and bias are frozen."""

    lora_A: torch.nn.Linear
    lora_B: torch.nn.Linear
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., O] of [..., I]."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(device, enabled=False):
            output: torch.Tensor = _MergedProduct.apply(
                input.to(dtype), self.weight.to(dtype), bias, self.lora_A.weight, self.lora_B.weight, self.scale
            )
        return output


class _MergedProduct(torch.autograd.Function):  # type: ignore[misc]
    """The product with a merged matrix, which is computed again for the backward pass instead of being kept."""

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return [..., O]."""
        context.save_for_backward(inputs, weight_OI, a_RI, b_OR)
        context.scale = scale
        return torch.nn.functional.linear(inputs, merged(weight_OI, change_of(a_RI, b_OR * scale)), bias_O)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of inputs, A and B."""
        inputs, weight_OI, a_RI, b_OR = context.saved_tensors
        scaled_OR = b_OR * context.scale
        of_inputs = of_a_RI = of_b_OR = None
        with torch.autocast(gradient.device.type, enabled=False):
            if context.needs_input_grad[0]:
                of_inputs = gradient @ merged(weight_OI, change_of(a_RI, scaled_OR))
            flat_TO, flat_TI = gradient.reshape(-1, gradient.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
            if context.needs_input_grad[3]:
                of_a_RI = ((flat_TO @ scaled_OR.to(gradient.dtype)).T @ flat_TI).to(a_RI.dtype)
            if context.needs_input_grad[4]:
                of_b_OR = (flat_TO.T @ (flat_TI @ a_RI.to(inputs.dtype).T)).to(b_OR.dtype) * context.scale
        return of_inputs, None, None, of_a_RI, of_b_OR, None


def add_adapters(model: Any, config: LoraConfig) -> list[str]:
    """Give the chosen layers of a transformers model an adapter, freeze everything else, and return their names.

    The adapters' values are those of `first_values` once these are written.

    Args:
        model: The model, in float32, with or without memory for its weights.
        config: Rank, scale, and the patterns of the layers.

    Raises:
        ConfigError: a pattern fits no layer.
    """
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    adapted = adapted_layers(list(layers), config.targets)
    model.requires_grad_(False)
    for name in adapted:
        _adapt(layers[name], config)
    return adapted


def _adapt(layer: Any, config: LoraConfig) -> None:
    layer.__class__ = AdaptedLinear  # in place, so that the matrix keeps its name and its owner
    layer.lora_A = _thin_layer(layer.in_features, config.rank, device=layer.weight.device)
    layer.lora_B = _thin_layer(config.rank, layer.out_features, device=layer.weight.device)
    layer.scale = config.scale


def _thin_layer(num_inputs: int, num_outputs: int, *, device: torch.device) -> torch.nn.Linear:
    """Return a layer without values: drawing some would move torch's random state."""
    layer = torch.nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=torch.float32, device=device))
    return layer


def adapter_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return A and B of every layer with an adapter, by name, in the order of the model."""
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def first_values(model: Any, *, seed: int) -> dict[str, torch.Tensor]:
    """Return what adapters begin with, in float32 on the host: A as torch draws linear layers, B zero.

    They are the same on every rank.

    Args:
        model: A model that has adapters; only their sizes count.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.zeros(tuple(parameter.shape)) for name, parameter in adapter_parameters(model).items()}
    for name, value in values.items():
        if name.endswith(LORA_A):
            torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return values


def round_base(model: Any, dtype: torch.dtype) -> None:
    """Keep the weights of the base in the precision that the policy computes in, as engines hold them."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def pushed_adapters(model: Any) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield the adapters as engines merge them: A, and B multiplied by the scale; both in float32.

    Of a sharded model they are sharded as its parameters are.
    """
    scales = {name: module.scale for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    for name, parameter in adapter_parameters(model).items():
        tensor = parameter.detach()
        if name.endswith(LORA_B):
            tensor = tensor * scales[name.removesuffix(LORA_B)]
        yield TensorSpec(name=name, dtype=ADAPTER_DTYPE, shape=tuple(tensor.shape)), tensor


def base_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the base, in a fixed order."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name, parameter.detach()
