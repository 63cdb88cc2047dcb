"""The gated delta rule over packed rows: the linear attention of most layers of Qwen3.5 (Yang et al. 2024, "Gated Delta
Networks: Improving Mamba2 with Delta Rule").

Each segment of a row is computed as if it stood alone after its prefix: its convolutions see the prefix's last tokens,
and its state begins as the prefix's ended, so that the gradients of all responses add up in the prompt's state.
transformers' own forward would let the samples of a row see each other.

A place of a batch without a token has zeros: with a decay of 1 and nothing to learn it changes no state.

Legend: T = tokens of a row, X = hidden size, C = channels of the convolution, H = heads of values, for each of which
there is one of queries and keys, D = dimension of a head, S and M as in `segment_batches`, L = own places of a segment.
"""

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import conv1d, pad, softplus

from penstock.errors import ConfigError
from services.trainer.backend.policy.attention import RowLayout
from services.trainer.backend.policy.layer_kinds import num_linear_layers
from services.trainer.batching.segment_batches import CHUNK_TOKENS, SegmentBatch


def use_packed_linear_attention(model: Any) -> None:
    """Make the layers of a transformers model that attend linearly read packed rows. Other models stay unchanged.

    Raises:
        ConfigError: a layer attends linearly in a way that packed rows do not reproduce.
    """
    layers = list(delta_layers_of(model))
    if len(layers) != num_linear_layers(model.config.get_text_config()):
        raise ConfigError(
            f"models of type {model.config.model_type} cannot read packed rows: the trainer knows the linear attention "
            "of Qwen3.5 alone; choose another model"
        )
    for layer in layers:
        layer.delta_rule = _chunked_rule()
        layer.forward = MethodType(_attend_linearly, layer)


def delta_layers_of(model: Any) -> Iterator[Any]:
    """Yield the linear attention of each layer of a transformers model that has one, in order."""
    yield from (module for module in model.modules() if type(module).__name__ == "Qwen3_5GatedDeltaNet")


def _chunked_rule() -> Any:
    """Return transformers' rule in plain torch, chunk by chunk; its own name would be another one where installed."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    return inspect.unwrap(torch_chunk_gated_delta_rule)


class _Inputs(NamedTuple):
    """What the rule reads of a row, with zeros for a token behind its last."""

    mixed_TC: torch.Tensor
    """Queries, keys and values before the convolution."""
    decay_TH: torch.Tensor
    """Logarithms of the factors on states."""
    beta_TH: torch.Tensor
    """How much of its value each token writes."""


def _attend_linearly(
    layer: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    row_layout: RowLayout,
    row_share: None = None,
    **_: Any,
) -> torch.Tensor:
    """Replace transformers' forward.

    Returns [1, T, X].

    Args:
        layer: The module.
        hidden_states: [1, T, X].
        attention_mask: None: a row has no padding that a mask would tell.
        row_layout: The row's segments, passed to the model's forward as a keyword.
        row_share: None: each rank computes whole rows.
    """
    assert attention_mask is None, "packed rows need no mask"
    assert row_share is None, "states pass through all tokens of a row"
    hidden_TX = hidden_states[0]
    decay_TH = -layer.A_log.float().exp() * softplus(layer.in_proj_a(hidden_TX).float() + layer.dt_bias)
    beta_TH = layer.in_proj_b(hidden_TX).sigmoid()
    inputs = _Inputs(*(pad(each, (0, 0, 0, 1)) for each in (layer.in_proj_qkv(hidden_TX), decay_TH, beta_TH)))
    num_before = layer.conv_kernel_size - 1
    index = row_layout.segment_batches(num_before)
    needs_states = index.batches[-1].states_S is not None
    outputs: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    for batch in index.batches:
        is_first = batch.states_S is None
        states = None if is_first else torch.cat(ends)[batch.states_S]
        output, end = _apply_rule(layer, inputs, batch, states, gives_states=is_first and needs_states)
        outputs.append(output.flatten(0, 1))
        if end is not None:
            ends.append(end)
    output_THD = torch.cat(outputs)[index.places_T]
    gate_THD = layer.in_proj_z(hidden_TX).unflatten(-1, output_THD.shape[1:])
    normed_THD = layer.norm(output_THD.flatten(0, 1), gate_THD.flatten(0, 1)).view_as(output_THD)
    projected: torch.Tensor = layer.out_proj(normed_THD.flatten(1))
    return projected[None]


def _apply_rule(
    layer: Any, inputs: _Inputs, batch: SegmentBatch, states: torch.Tensor | None, *, gives_states: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [S, L, H, D], and if wanted the states [S, H, D, D] in which the segments end.

    Args:
        layer: The module.
        inputs: Of the row.
        batch: The segments.
        states: [S, H, D, D] in which they begin; None: zeros.
        gives_states: Whether the states are wanted.
    """
    from transformers.activations import ACT2FN

    own_SL = batch.tokens_SM[:, layer.conv_kernel_size - 1 :]
    mixed_SCM = inputs.mixed_TC[batch.tokens_SM].transpose(1, 2)
    weight = layer.conv1d.weight
    mixed_SCL = conv1d(mixed_SCM.to(weight.dtype), weight, layer.conv1d.bias, groups=layer.conv_dim)
    mixed_SLC = ACT2FN[layer.activation](mixed_SCL).to(mixed_SCM.dtype).transpose(1, 2)
    query, key, value = mixed_SLC.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    repeats = layer.num_v_heads // layer.num_k_heads
    query, key = (
        each.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)).repeat_interleave(repeats, dim=2)
        for each in (query, key)
    )
    with torch.autocast(value.device.type, enabled=False):  # states are float32, and so is what they are computed from
        output, ends = layer.delta_rule(
            query,
            key,
            value.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
            g=inputs.decay_TH[own_SL],
            beta=inputs.beta_TH[own_SL],
            chunk_size=CHUNK_TOKENS,
            initial_state=states,
            output_final_state=gives_states,
            use_qk_l2norm_in_kernel=True,
        )
    return output, ends
