"""Has tokens go through the experts that the engine chose, in place of those that the trainer's routers choose.

Engine and trainer round differently, so scores that are nearly equal choose other experts, and the token's
log-probability jumps. With the engine's experts both compute the same function again. The weights of the experts are
the trainer's: its scores at these experts, normalised as always, so that the gradient reaches the router (Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", R3).

Invariant: a layer's router is told before each forward pass, also when activations are computed again.

Legend: T = tokens, L = layers, K = experts of a token.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from services.trainer.backend.policy.experts.mixture import routers_of

KEYWORD = "routed_experts"
"""Keyword of the model's forward for int16[T, L, K]: the experts of each token, negative where routers choose."""


def replay_routers(layers: Iterable[Any]) -> None:
    """Have the routers of a transformers model take the experts of `KEYWORD`.

    Args:
        layers: All layers of the language model, in order.
    """
    for number, layer in enumerate(layers):
        for router in routers_of(layer):
            layer.register_forward_pre_hook(partial(_tell, router, number), with_kwargs=True)


def _tell(router: Any, number: int, _layer: Any, _args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    experts_TLK = inputs.get(KEYWORD)
    router.replayed_TK = None if experts_TLK is None else experts_TLK[:, number]
