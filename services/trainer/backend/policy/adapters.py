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

from penstock.errors import ConfigError
from penstock.model.families.experts import has_experts
from penstock.weights.adapters import ADAPTER_DTYPE, LORA_B, change_of, is_adapter, merged
from penstock.weights.manifest import TensorSpec
from services.trainer.backend.optimizer.learning_rates import matches
from services.trainer.config import LoraConfig

_SETTING = "trainer.lora.targets"


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


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> list[str]:
    """Give the chosen layers of a transformers model an adapter, freeze everything else, and return their names.

    A is drawn as torch draws linear layers, B is zero.

    Args:
        model: The model, in float32.
        config: Rank, scale, and the patterns of the layers.
        seed: Seed of the draw.

    Raises:
        ConfigError: a pattern fits no layer, or the model is a mixture of experts.
    """
    model_type = model.config.model_type
    if has_experts(model_type):
        raise ConfigError(
            f"trainer.lora: models of type {model_type} have experts, which take no adapters yet; choose a dense "
            "model, or leave trainer.lora out"
        )
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    for pattern in config.targets:
        if not any(matches(name, pattern) for name in layers):
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"{_SETTING}: no linear layer fits {pattern!r}; this model's are {', '.join(kinds)}, in parts such as "
                "text and tower. The output head takes no adapter"
            )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    adapted = [name for name in layers if any(matches(name, pattern) for pattern in config.targets)]
    for name in adapted:
        _adapt(layers[name], config, generator)
    return adapted


def _adapt(layer: Any, config: LoraConfig, generator: torch.Generator) -> None:
    layer.__class__ = AdaptedLinear  # in place, so that the matrix keeps its name and its owner
    layer.lora_A = torch.nn.Linear(layer.in_features, config.rank, bias=False)
    layer.lora_B = torch.nn.Linear(config.rank, layer.out_features, bias=False)
    layer.scale = config.scale
    with torch.no_grad():
        torch.nn.init.kaiming_uniform_(layer.lora_A.weight, a=math.sqrt(5), generator=generator)
        layer.lora_B.weight.zero_()


def round_bases(model: Any, dtype: torch.dtype) -> None:
    """Keep the frozen matrices of layers with adapters in the precision that the policy computes in."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            module.weight.data = module.weight.data.to(dtype)


def pushed_adapters(model: Any) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield the adapters as engines merge them: A, and B multiplied by the scale; both in float32."""
    scales = {name: module.scale for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        tensor = parameter.detach()
        if name.endswith(LORA_B):
            tensor = tensor * scales[name.removesuffix(LORA_B)]
        yield TensorSpec(name=name, dtype=ADAPTER_DTYPE, shape=tuple(tensor.shape)), tensor


def frozen_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the base, in a fixed order."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name, parameter.detach()
