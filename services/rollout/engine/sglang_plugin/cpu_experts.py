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
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden_TH, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
    output_TH = torch.zeros_like(hidden_TH)
    tokens_S, places_S = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    if len(tokens_S):  # each as a token of one expert
        own = chosen._replace(
            topk_weights=chosen.topk_weights[tokens_S, places_S, None],
            topk_ids=chosen.topk_ids[tokens_S, places_S, None],
        )
        dispatched = dispatch_output._replace(hidden_states=hidden_TH[tokens_S], topk_output=own)
        outputs_SH = compute(method, layer=layer, dispatch_output=dispatched).hidden_states
        output_TH.index_add_(0, tokens_S, outputs_SH.to(output_TH.dtype))
    return StandardCombineInput(hidden_states=output_TH)
