"""Adapters for the model that engines are measured with, and that model with them."""

import copy

import torch

from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.named_weights import NamedWeights
from tests.support.engine.reference import Reference

ADAPTED = ("_proj", "attn.qkv", "mlp.linear_fc1")
"""Ends of the layers that get one: fused, divided by rows and by columns, in language model and tower."""


def with_adapters(base: Reference, *, seed: int, rank: int = 3) -> tuple[NamedWeights, Reference]:
    """Return a push of adapters, whose B contains the scale, and the policy that they make of `base`."""
    generator = torch.Generator().manual_seed(seed)
    policy = copy.copy(base)
    policy.model = copy.deepcopy(base.model)
    pushed: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            layer = name.removesuffix(".weight")
            if weight.ndim != 2 or not layer.endswith(ADAPTED):
                continue
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.1
            pushed |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            weight.add_(b @ a)
    named = NamedWeights.of(pushed)
    digests = {name: tensor_digest(weight, XXH3) for name, weight in base.weights.items()}
    return (
        NamedWeights(specs=named.specs, device=named.device, tensors=named.tensors, base_digests=digests),
        policy,
    )
