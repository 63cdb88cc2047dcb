"""The gated delta rule in few steps, for tensors without memory.

transformers' rule takes a step for each chunk of a segment and keeps that step's state for the backward pass: thousands
of small operations, which cost a plan minutes. Here parts of a long segment are computed beside each other, each as if
it were a segment. The kept chunks and states are as many as in transformers' rule; only their values would differ.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from services.trainer.batching.segment_batches import CHUNK_TOKENS

MAX_STEPS = 16
"""Steps of a call."""


def in_few_steps(rule: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> Callable[..., Any]:
    """Return a rule with the sizes of another one, and other values.

    Args:
        rule: It takes queries and keys of [S, L, H, K], values of [S, L, H, V], decays and betas of [S, L, H], and
            perhaps states of [S, H, K, V]; it returns [S, L, H, V] and perhaps states.
    """

    def rule_in_few_steps(
        *inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor | None, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_segments, num_tokens = g.shape[:2]
        num_chunks = -(-num_tokens // CHUNK_TOKENS)
        num_parts = -(-num_chunks // MAX_STEPS)
        if num_parts == 1:
            return rule(*inputs, g=g, beta=beta, initial_state=initial_state, **settings)
        padded = -(-num_chunks // num_parts) * num_parts * CHUNK_TOKENS

        def parts_of(tensor: torch.Tensor) -> torch.Tensor:
            filled = pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padded - num_tokens))
            return filled.reshape(num_segments * num_parts, padded // num_parts, *tensor.shape[2:])

        output, ends = rule(
            *map(parts_of, inputs),
            g=parts_of(g),
            beta=parts_of(beta),
            initial_state=None if initial_state is None else initial_state.repeat_interleave(num_parts, dim=0),
            **settings,
        )
        output = output.reshape(num_segments, padded, *output.shape[2:])[:, :num_tokens]
        return output, None if ends is None else ends[::num_parts]

    return rule_in_few_steps
