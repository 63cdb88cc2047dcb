"""The gated delta rule on a CPU, in plain PyTorch, because SGLang has kernels for it on accelerators only. Runs inside
SGLang's scheduler.

The rule itself is transformers': by chunks for prompts, token by token in decoding. A request's state, and the window
of the last tokens that its next convolution sees, lie in a slot of SGLang's pool.

Invariants: sequences of a batch do not see each other; a prompt that goes on from a cached prefix goes on from the
state and the window in its slot, and leaves there what its next token needs.

Legend: T = tokens of a pass, B = sequences, C = channels of the convolution, W = its width, H = heads of values, K =
heads of queries and keys, D = size of a head of queries and keys, V = size of a head of values, S = slots.
"""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import conv1d, silu, softplus

_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
_KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_GATED_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm"
_MODEL = "sglang.srt.models.qwen3_5"


def register() -> None:
    """Register the functions in place of SGLang's kernels."""
    for target, function in (
        (f"{_BACKEND}.causal_conv1d_fn", convolve_prompts),
        (f"{_BACKEND}.causal_conv1d_update", convolve_tokens),
        (f"{_BACKEND}.fused_gdn_gating", gates_of),
        (f"{_KERNEL}.extend", extend_states),
        (f"{_KERNEL}.packed_decode", decode_tokens),
        (f"{_GATED_NORM}.forward", norm_gated),
        (f"{_MODEL}.fused_qkvzba_split_reshape_cat_contiguous", split_projections),
        (f"{_MODEL}.fused_sigmoid_mul", gate_by_sigmoid),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve each sequence's new tokens after its window, and write the new window; return [C, T].

    Args:
        x: [C, T], the sequences one after the other.
        weight: [C, W].
        bias: None: the family has none.
        conv_states: Windows [S, C, W - 1].
        query_start_loc: Where each sequence begins, and the end, int[B + 1].
        cache_indices: Slot of each sequence, int[B].
        has_initial_state: Which sequences have a window, bool[B]; those of others begin with zeros.
    """
    output = torch.empty_like(x)
    for number, (start, end, slot) in enumerate(_spans(query_start_loc, cache_indices)):
        window = conv_states[slot]
        if not has_initial_state[number]:
            window = torch.zeros_like(window)
        seen = torch.cat([window.to(x.dtype), x[:, start:end]], dim=1)
        mixed = conv1d(seen[None].float(), weight[:, None].float(), groups=len(weight))
        output[:, start:end] = silu(mixed[0]).to(x.dtype)
        conv_states[slot] = seen[:, -window.shape[1] :].to(conv_states.dtype)
    return output


def convolve_tokens(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve one new token of each sequence, and write the new windows; return [B, C].

    Args:
        x: [B, C].
        conv_state: Windows [S, C, W - 1].
        weight: [C, W].
        bias: None: the family has none.
        activation: Always SiLU.
        conv_state_indices: Slot of each sequence, int[B].
    """
    slots = conv_state_indices.long()
    seen_BCW = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], dim=-1)
    conv_state[slots] = seen_BCW[..., 1:].to(conv_state.dtype)
    mixed_BC = (seen_BCW.float() * weight.float()).sum(dim=-1)
    return silu(mixed_BC).to(x.dtype)


def gates_of(
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, as [1, T, H] in float32, logarithms of the factors on states, and how much each token writes.

    Args:
        A_log: [H].
        a: [T, H].
        b: [T, H].
        dt_bias: [H].
    """
    decay_TH = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay_TH[None], b.float().sigmoid().to(b.dtype).float()[None]


def extend_states(
    _kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Apply the rule to each sequence's new tokens, and write its new state; return [1, T, H, V] first.

    Args:
        q: [1, T, K, D], the sequences one after the other.
        k: Likewise.
        v: [1, T, H, V].
        g: From `gates_of`.
        beta: Likewise.
        ssm_states: States [S, H, V, D]; SGLang clears that of a sequence without a prefix.
        cache_indices: Slot of each sequence, int[B].
        query_start_loc: Where each sequence begins, and the end, int[B + 1].
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    # transformers' own function would take another implementation wherever one is installed.
    rule = inspect.unwrap(torch_chunk_gated_delta_rule)
    output = torch.empty_like(v)
    q, k = (_for_values(each, v.shape[2]) for each in (q, k))
    for start, end, slot in _spans(query_start_loc, cache_indices):
        output[:, start:end], state = rule(
            *(each[:, start:end] for each in (q, k, v, g, beta)),
            initial_state=ssm_states[slot].transpose(-1, -2)[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        ssm_states[slot] = state[0].transpose(-1, -2).to(ssm_states.dtype)
    return output, None, None


def decode_tokens(
    _kernel: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    num_v_heads: int,
    head_v_dim: int,
    **_: Any,
) -> torch.Tensor:
    """Apply the rule to one new token of each sequence, and write the new states; return [1, B, H, V].

    Args:
        mixed_qkv: Queries, keys and values [B, C].
        a: As for `gates_of`, and so are b, A_log and dt_bias.
        b: [B, H].
        A_log: [H].
        dt_bias: [H].
        ssm_states: States [S, H, V, D].
        cache_indices: Slot of each sequence, int[B].
        num_v_heads: H.
        head_v_dim: V.
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    rule = inspect.unwrap(torch_recurrent_gated_delta_rule)
    slots, size = cache_indices.long(), ssm_states.shape[-1]
    of_values = num_v_heads * head_v_dim
    of_keys = (mixed_qkv.shape[1] - of_values) // 2
    q, k, v = mixed_qkv[:, None].split([of_keys, of_keys, of_values], dim=-1)  # each sequence has one token
    q, k = (_for_values(each.unflatten(-1, (-1, size)), num_v_heads) for each in (q, k))
    decay, beta = gates_of(A_log, a, b, dt_bias)
    output, states = rule(
        q,
        k,
        v.unflatten(-1, (num_v_heads, head_v_dim)),
        decay.transpose(0, 1),
        beta.transpose(0, 1),
        initial_state=ssm_states[slots].transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ssm_states[slots] = states.transpose(-1, -2).to(ssm_states.dtype)
    result: torch.Tensor = output.transpose(0, 1)
    return result


def norm_gated(norm: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of `x`, times SiLU of `z`, both [rows, V].

    Args:
        norm: SGLang's module, for its weight and epsilon.
        x: Outputs of the rule.
        z: Gates.
    """
    scale = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + norm.eps)
    return (x.float() * scale * norm.weight.float() * silu(z.float())).to(x.dtype)


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take a layer's two projections apart: what is convolved [T, C], its gates [T, H, V], b and a [T, H].

    Args:
        mixed_qkvz: [T, C + H * V].
        mixed_ba: [T, 2 * H].
        num_heads_qk: K.
        num_heads_v: H.
        head_qk: D.
        head_v: V.
    """
    of_values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + of_values, of_values], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return mixed_qkv.contiguous(), z.unflatten(-1, (num_heads_v, head_v)), b.contiguous(), a.contiguous()


def gate_by_sigmoid(attn_output: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the output of full attention [T, heads * size] times the sigmoid of its gate, [T, heads, size] or flat."""
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def _spans(starts: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield where each sequence begins and ends among the tokens of a pass, and its slot."""
    for (start, end), slot in zip(itertools.pairwise(starts.tolist()), slots.tolist(), strict=True):
        yield start, end, slot


def _for_values(heads: torch.Tensor, num_v_heads: int) -> torch.Tensor:
    """Repeat queries or keys [..., K, D] for the heads of values that share them: [..., H, D]."""
    return heads.repeat_interleave(num_v_heads // heads.shape[-2], dim=-2)
