"""Sets how a mixture of experts is computed: by grouped products, and in which precision where autocast does not say.

Routers choose: if nearly equal scores are rounded, they choose other experts, and the token's log-probability jumps. So
their inputs are rounded like all others, but their scores are float32; `token_logprobs` treats the head the same way.
Experts are multiplied by a grouped product, which autocast does not know, so they are rounded here.

Legend: T = tokens, H = hidden size, E = experts, K = experts of a token.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch


def set_mixture_precision(model: Any) -> None:
    """Make every router and all experts of a transformers model compute this way. Dense models stay unchanged."""
    for router in routers_of(model):
        router.replayed_TK = None
        router.forward = MethodType(_route, router)
    for experts in experts_of(model):
        experts.forward = MethodType(_compute, experts)


def use_grouped_products(model: Any) -> None:
    """Have all experts of a layer computed by grouped products, whatever the config of a transformers model says.

    Dense models stay unchanged.
    """
    if next(experts_of(model), None) is not None:
        model.set_experts_implementation("grouped_mm")


def routers_of(model: Any) -> Iterator[Any]:
    """Yield the router of each layer of a transformers model that has one, in order."""
    yield from (module for module in model.modules() if type(module).__name__.endswith("TopKRouter"))


def experts_of(model: Any) -> Iterator[Any]:
    """Yield the module that holds all experts of a layer, for each layer of a transformers model that has any."""
    for module in list(model.modules()):
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
            yield module


def _route(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace transformers' forward.

    Returns float32[T, E] scores, [T, K] weights in the precision of the input, and int64[T, K] experts.

    Args:
        router: The module; its weight is [E, H], and its `replayed_TK` the experts to take, negative where it chooses.
        hidden_states: [..., H].
    """
    hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    weight_EH = router.weight
    if (dtype := autocast_dtype(hidden_TH)) is not None:
        hidden_TH, weight_EH = hidden_TH.to(dtype), weight_EH.to(dtype)
    with torch.autocast(hidden_TH.device.type, enabled=False):
        scores_TE = torch.nn.functional.linear(hidden_TH.float(), weight_EH.float())
        probabilities_TE = scores_TE.softmax(dim=-1)
        weights_TK, experts_TK = probabilities_TE.topk(router.top_k, dim=-1)
        if router.replayed_TK is not None:
            replayed_TK = router.replayed_TK.long()
            experts_TK = replayed_TK.where(replayed_TK >= 0, experts_TK)
            weights_TK = probabilities_TE.gather(1, experts_TK)
        if getattr(router, "norm_topk_prob", True):  # Qwen3-VL-MoE's always do
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return scores_TE, weights_TK.to(hidden_states.dtype), experts_TK


def _compute(experts: Any, hidden_TH: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return [T, H]: transformers' forward with inputs and weights in autocast's precision."""
    forward = type(experts).forward
    if (dtype := autocast_dtype(hidden_TH)) is None:
        output: torch.Tensor = forward(experts, hidden_TH, *args)
    else:
        output = forward(_Rounded(experts, dtype), hidden_TH.to(dtype), *args)
    return output


class _Rounded:
    """A view of a module with its parameters in another precision."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the precision that autocast computes in on the tensor's device; None where it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
