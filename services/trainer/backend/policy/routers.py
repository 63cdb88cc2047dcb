"""The routers of a mixture of experts: in float32, whatever the rest of the model computes in.

Which experts a token is sent to is a choice: rounded scores that are nearly equal choose others, and the token's
log-probability jumps. slime and Megatron route in float32 for the same reason (`--moe-router-dtype fp32`).

Legend: T = tokens, H = hidden size, E = experts, K = experts of a token.
"""

from types import MethodType
from typing import Any

import torch


def route_in_float32(model: Any) -> None:
    """Have every router of a transformers model compute in float32, under autocast and with rounded weights too."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = MethodType(_route, module)


def _route(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As transformers' forward, which this replaces.

    Returns float32[T, E] scores, [T, K] weights in the precision of the input, and int64[T, K] experts.

    Args:
        router: The module; its weight is [E, H].
        hidden_states: [..., H].
    """
    hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    with torch.autocast(hidden_TH.device.type, enabled=False):
        logits_TE = torch.nn.functional.linear(hidden_TH.float(), router.weight.float())
        weights_TK, experts_TK = logits_TE.softmax(dim=-1).topk(router.top_k, dim=-1)
        if getattr(router, "norm_topk_prob", True):  # Qwen3-VL-MoE's always do
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return logits_TE, weights_TK.to(hidden_states.dtype), experts_TK
