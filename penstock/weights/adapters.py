"""Low-rank adapters (LoRA): their tensors in a push, and the weights that contain them.

An adapter changes a matrix `<layer>.weight`, [O, I], by B A of a low rank R. A push of adapters carries two tensors for
each changed matrix, both in float32: `<layer>.lora_A.weight`, [R, I], and `<layer>.lora_B.weight`, [O, R], which is
already multiplied by alpha / rank. The matrix itself does not travel.

Invariant: trainer and engine merge with the same functions, from the same base and in the same precision, so both
compute with the same matrix.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from dataclasses import dataclass
from typing import Final

import torch

from penstock.errors import InvalidRequestError
from penstock.weights.adapter_names import LORA_A, LORA_B, is_adapter
from penstock.weights.manifest import Manifest, TensorSpec

ADAPTER_DTYPE: Final = "float32"
"""Precision of adapters in a push: their product is added to the base before it is rounded."""


@dataclass(frozen=True, slots=True)
class AdapterSpecs:
    """The two tensors that change one matrix."""

    a: TensorSpec
    b: TensorSpec

    @property
    def changed_shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.b.shape[0], self.a.shape[1]


def adapted_weights(manifest: Manifest) -> dict[str, AdapterSpecs]:
    """Return the adapters of a push by the name of the matrix that they change; empty if it carries whole weights.

    Raises:
        InvalidRequestError: it carries both, or half of an adapter, or its tensors do not fit each other.
    """
    specs = {spec.name: spec for spec in manifest.tensors}
    names = sorted(filter(is_adapter, specs))
    if not names:
        return {}
    if whole := sorted(specs.keys() - set(names)):
        raise InvalidRequestError(f"manifest mixes adapters ({names[0]}) and whole weights ({whole[0]}); push either")
    layers = sorted({name.removesuffix(LORA_A).removesuffix(LORA_B) for name in names})
    return {f"{layer}.weight": _of_layer(layer, specs) for layer in layers}


def _of_layer(layer: str, specs: dict[str, TensorSpec]) -> AdapterSpecs:
    a, b = specs.get(layer + LORA_A), specs.get(layer + LORA_B)
    if a is None or b is None:
        raise InvalidRequestError(f"manifest: the adapter of {layer} lacks {LORA_A if a is None else LORA_B}")
    shapes = f"{list(a.shape)} and {list(b.shape)}"
    if (len(a.shape), len(b.shape)) != (2, 2) or a.shape[0] != b.shape[1]:
        raise InvalidRequestError(f"manifest: the adapter of {layer} has {shapes}, not [rank, in] and [out, rank]")
    if {a.dtype, b.dtype} != {ADAPTER_DTYPE}:
        raise InvalidRequestError(
            f"manifest: the adapter of {layer} is {a.dtype} and {b.dtype}; push adapters in {ADAPTER_DTYPE}"
        )
    return AdapterSpecs(a, b)


def change_of(a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """Return what an adapter adds to its matrix: float32[O, I].

    Args:
        a_RI: A.
        b_OR: B, multiplied by alpha / rank.
    """
    with torch.autocast(a_RI.device.type, enabled=False):
        return b_OR.float() @ a_RI.float()


def merged(base: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Return a matrix with its adapter, rounded once to the precision of the base.

    With a change of zero it equals the base.

    Args:
        base: The matrix without the adapter, or any part of it.
        change: From `change_of`, or the same part of it.
    """
    return (base.float() + change).to(base.dtype)
