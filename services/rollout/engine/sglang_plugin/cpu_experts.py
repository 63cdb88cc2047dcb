"""Computes a process's own experts on a CPU, where experts are divided as wholes among an engine's processes.

SGLang marks the experts of other processes by negative numbers, which its kernels for GPUs leave out; its own code for
CPUs does not know them. Runs inside SGLang's scheduler processes.

Legend: T = tokens, H = hidden size, K = experts of a token, S = those of all tokens that this process owns.
"""

from collections.abc import Callable
from typing import Any

import torch


def compute_own(compute: Callable[..., Any], method: Any, *, layer: Any, dispatch_output: Any) -> Any:
    """Hook around the experts of a layer: return [T, H], to which the other processes' are added.

    Args:
        compute: SGLang's own method.
        method: Its object.
        layer: The layer.
        dispatch_output: Inputs [T, H], and weights [T, K] and experts [T, K] of each token.
    """
    if layer.moe_ep_size == 1:
        return compute(method, layer=layer, dispatch_output=dispatch_output)
    hidden_TH, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
    tokens_S, places_S = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    if not len(tokens_S):  # any expert will do, with the weight 0
        none = chosen._replace(
            topk_weights=torch.zeros_like(chosen.topk_weights[:, :1]), topk_ids=torch.zeros_like(chosen.topk_ids[:, :1])
        )
        return compute(method, layer=layer, dispatch_output=dispatch_output._replace(topk_output=none))
    own = chosen._replace(  # each as a token of one expert
        topk_weights=chosen.topk_weights[tokens_S, places_S, None],
        topk_ids=chosen.topk_ids[tokens_S, places_S, None],
    )
    dispatched = dispatch_output._replace(hidden_states=hidden_TH[tokens_S], topk_output=own)
    output = compute(method, layer=layer, dispatch_output=dispatched)
    output_TH = torch.zeros_like(hidden_TH).index_add_(0, tokens_S, output.hidden_states.to(hidden_TH.dtype))
    return output._replace(hidden_states=output_TH)
