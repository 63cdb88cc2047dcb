"""Counts the memory that one packed row takes in its forward and backward pass, beside weights and their gradients.

It is not estimated by a formula: the trainer's own policy computes a row of tensors without memory (`shapes_only`) with
a model of the same widths, and the bytes that exist at a time are counted. Layers of one kind are alike, and so are
blocks. So the sum follows from a small model and from models with one layer of a kind, or one block, more. Each phase
is summed on its own, because in small models another phase takes the most.

Invariant: attention is counted as computed on a GPU in half precision, without copies for buckets.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from services.plan.adapter_shape import AdapterShape
from services.plan.linear_attention.few_steps import in_few_steps
from services.plan.live_bytes import LiveBytes
from services.plan.model_shape import NUM_BLOCKS, NUM_LAYERS, ModelShape, make_model
from services.plan.parameter_names import kind_of
from services.plan.shapes_only import ShapesOnly
from services.trainer.backend.policy import attention, tower
from services.trainer.backend.policy.experts.expert_dispatch import weighed
from services.trainer.backend.policy.experts.mixture import experts_of
from services.trainer.backend.policy.linear_attention import delta_layers_of
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.row_share import RowShare
from services.trainer.batching.rows import PackedRow, Segment
from services.trainer.config import LoraConfig

NUM_PHASES = 4
_AT_HEAD = 1
"""Number of the phase in which there are logits."""
_MAX_IMAGE_TOKENS = 1024
"""The most tokens of one image of the row: about a million pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The parts of a row: one prompt, followed by its responses."""

    num_tokens: int
    num_prompt_tokens: int
    """At least one more than the image tokens."""
    num_image_tokens: int
    """Tokens of images, all in the prompt."""
    num_responses: int
    shares_prompt: bool = True
    """Whether all responses see the prompt's keys and values; else the row is as many samples of equal length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingBytes:
    """What a row takes at its fullest moment, beside weights and their gradients."""

    activations: int
    logits: int
    """Logits, their gradients and the head's; 0 if the fullest moment is one without them."""

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.activations + self.logits


def working_bytes(
    shape: ModelShape,
    row: RowShape,
    *,
    learning_rates: tuple[tuple[str, float], ...],
    gradient_checkpointing: bool,
    float32_head: bool,
    dispatches_tokens: bool,
    sequence_parallel: int = 1,
    is_sharded: bool = False,
) -> WorkingBytes:
    """Return what a row takes at the moment when it takes most.

    Args:
        shape: Shape of the model.
        row: Shape of the row.
        learning_rates: Patterns and rates as in a recipe; parameters with rate 0 are not trained.
        gradient_checkpointing: Whether activations are recomputed.
        float32_head: Whether the output head is multiplied in float32.
        dispatches_tokens: Whether tokens travel to the ranks that own their experts, from which as many come as go.
        sequence_parallel: Ranks that share the row, of which the last is counted: all of its tokens are the policy's.
        is_sharded: Whether several ranks hold the weights, where frozen embeddings pass on gradients too.

    Raises:
        ConfigError: a pattern fits no parameter, or nothing is trained.
    """
    kinds = frozenset(map(kind_of, shape.trained(dict(learning_rates))))

    def measured(layer_kinds: tuple[str, ...], num_blocks: int) -> list[int]:
        config = shape.smaller(layer_kinds, num_blocks=num_blocks)
        shapes_only = ShapesOnly()
        with shapes_only.without_numbers():
            policy = PolicyModel(
                make_model(config, torch.bfloat16),
                temperature=1.0,
                forbidden_ids=(),
                float32_head=float32_head,
                gradient_checkpointing=gradient_checkpointing,
            )
            if shape.adapters is not None:
                _add_adapters(policy.model, shape.adapters)
            _prepare_gradients(policy, kinds)
            if is_sharded:
                policy.model.enable_input_require_grads()
            if sequence_parallel > 1:
                policy.share_rows(functools.partial(_ShareOfLast, size=sequence_parallel))
        return _counted(policy, shapes_only, make_row(row, config), dispatches_tokens=dispatches_tokens)

    first, last = _divided(shape.layer_kinds)
    num_blocks = min(NUM_BLOCKS, shape.num_blocks)
    least = measured(last, num_blocks)
    sums = list(least)
    for kind, count in Counter(first).items():
        sums = _added(sums, _difference(measured((kind, *last), num_blocks), least), count)
    if shape.num_blocks > num_blocks:
        sums = _added(sums, _difference(measured(last, num_blocks + 1), least), shape.num_blocks - num_blocks)
    pixels = make_row(row, shape.config).pixel_values_PD  # they have values, so they were not counted
    *peaks, before_logits = sums
    logits = peaks[_AT_HEAD] - before_logits if peaks[_AT_HEAD] == max(peaks) else 0
    return WorkingBytes(activations=(0 if pixels is None else pixels.nbytes) + max(peaks) - logits, logits=logits)


def _divided(layer_kinds: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide a model's layers: the last ones, with one of each kind at least, are those of the small model."""
    kinds = set(layer_kinds)
    num_last = min(NUM_LAYERS, len(layer_kinds))
    while not kinds <= set(layer_kinds[-num_last:]):
        num_last += 1
    return layer_kinds[:-num_last], layer_kinds[-num_last:]


def _difference(larger: Sequence[int], least: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(larger, least, strict=True)]


def _added(counted: Sequence[int], further: Sequence[int], count: int) -> list[int]:
    return [each + more * count for each, more in zip(counted, further, strict=True)]


def _add_adapters(model: Any, adapters: AdapterShape) -> None:
    """Give a layer an adapter if any layer of its kind has one, as `_prepare_gradients` trains parameters."""
    kinds = set(map(kind_of, adapters.layers))
    layers = tuple(name for name, _ in model.named_modules() if kind_of(name) in kinds)
    if layers:
        AdapterShape.add(model, LoraConfig(rank=adapters.rank, targets=layers))


def _prepare_gradients(policy: PolicyModel, kinds: Set[str]) -> None:
    """Train a layer's parameter if any layer's is trained, because the trained ones decide what the others keep."""
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(kind_of(name) in kinds)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget_gradient)


def _counted(policy: PolicyModel, shapes_only: ShapesOnly, row: PackedRow, *, dispatches_tokens: bool) -> list[int]:
    """Return the peak of each phase, and last what exists when the logits begin.

    The phases: forward to the head, forward and back through it, back through the text, then through the tower.
    """
    _compute_as_on_gpus(policy, dispatches_tokens=dispatches_tokens)
    live = LiveBytes()
    for tensor in (*policy.parameters(), *policy.buffers()):
        live.leave_out(tensor)
    base = policy.model.base_model
    before_logits: list[int] = []

    def mark_at_head(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        live.mark()
        before_logits.append(live.now)
        _mark_at_gradient(output, live)

    getattr(base, "language_model", base).norm.register_forward_hook(mark_at_head)
    if row.pixel_values_PD is not None:
        base.visual.merger.register_forward_pre_hook(lambda _module, inputs: _mark_at_gradient(inputs[0], live))
    with _attention_of_gpus(), shapes_only, live:
        with torch.autocast("cpu", torch.bfloat16):
            output = policy(row)
        if output.logprobs_N.requires_grad:  # false for a row without images if only the tower is trained
            output.logprobs_N.sum().backward()
    return [*live.peaks, *[0] * (NUM_PHASES - len(live.peaks)), *before_logits]


def _mark_at_gradient(tensor: torch.Tensor, live: LiveBytes) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda _: live.mark())


def _forget_gradient(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def make_row(row: RowShape, config: Any) -> PackedRow:
    """Return a row with these sizes for a model of the config, with meaningless tokens and positions."""
    vision = getattr(config, "vision_config", None)
    ids_T = torch.zeros(row.num_tokens, dtype=torch.int64)
    grid_thw_U3 = pixel_values_PD = image_tokens_J = None
    if vision is not None and row.num_image_tokens:
        side = math.isqrt(min(row.num_image_tokens, _MAX_IMAGE_TOKENS))
        num_images = row.num_image_tokens // side**2
        image_tokens_J = torch.arange(1, 1 + num_images * side**2)
        ids_T[image_tokens_J] = config.image_token_id
        patches = side * vision.spatial_merge_size
        grid_thw_U3 = torch.tensor([[1, patches, patches]] * num_images)
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixel_values_PD = torch.zeros(num_images * patches**2, values)
    prompt = row.num_prompt_tokens
    return PackedRow(
        input_ids_T=ids_T,
        positions_AT=torch.arange(row.num_tokens).repeat(4, 1),
        segments=tuple(_segments(row)),
        predict_N=torch.arange(prompt - 1, row.num_tokens - 1),
        targets_N=torch.zeros(row.num_tokens - prompt, dtype=torch.int64),
        sample_N=torch.zeros(row.num_tokens - prompt, dtype=torch.int64),
        engine_logprobs_N=torch.zeros(row.num_tokens - prompt),
        versions_N=torch.zeros(row.num_tokens - prompt, dtype=torch.int64),
        pixel_values_PD=pixel_values_PD,
        grid_thw_U3=grid_thw_U3,
        image_numbers_I=() if grid_thw_U3 is None else tuple(range(len(grid_thw_U3))),
        image_tokens_J=image_tokens_J,
        num_padded=0,
    )


def _segments(row: RowShape) -> Iterator[Segment]:
    first, stop = row.num_prompt_tokens if row.shares_prompt else 0, row.num_tokens
    if row.shares_prompt:
        yield Segment(start=0, stop=first)
    edges = [first + (stop - first) * number // row.num_responses for number in range(row.num_responses + 1)]
    for edge, next_edge in itertools.pairwise(edges):
        if next_edge > edge:
            yield Segment(start=edge, stop=next_edge, prefix_start=0, prefix_stop=first)


@contextmanager
def _attention_of_gpus() -> Iterator[None]:
    """Compute attention in this context as on a GPU in half precision."""
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.packed_attention_of_gpus)
    in_tower = functools.partial(tower.tower_attention, elsewhere=tower.attend_in_one_call)
    AttentionInterface.register(tower.NAME, in_tower)
    try:
        yield
    finally:
        AttentionInterface.register(attention.NAME, attention.packed_attention)
        AttentionInterface.register(tower.NAME, tower.tower_attention)


def _compute_as_on_gpus(policy: PolicyModel, *, dispatches_tokens: bool) -> None:
    """Have modules compute as on GPUs if they take other memory there, without reading values, and in few steps.

    Autocast normalises in float32 on GPUs. The choice of experts does not affect sizes.
    """
    for module in policy.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.forward = MethodType(_normalize, module)
    for layer in delta_layers_of(policy.model):
        layer.delta_rule = in_few_steps(layer.delta_rule)
    for experts in experts_of(policy.model):
        experts.forward = MethodType(_dispatch_any if dispatches_tokens else _compute_any, experts)


def _normalize(norm: torch.nn.LayerNorm, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(
        inputs.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
    )


def _compute_any(
    experts: Any, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Return [T, H]: each token goes through its usual number of experts, all of them the first one."""
    dtype = torch.get_autocast_dtype("cpu")
    tokens_M = torch.arange(experts_TK.numel()) % len(hidden_TH)
    rows_MH = hidden_TH.to(dtype)[tokens_M]
    gate_MI, up_MI = (rows_MH @ experts.gate_up_proj.to(dtype)[0].T).chunk(2, dim=-1)
    output_MH = (experts.act_fn(gate_MI) * up_MI) @ experts.down_proj.to(dtype)[0].T
    output_MH = output_MH * weights_TK.reshape(-1, 1)
    return torch.zeros_like(hidden_TH).index_add(0, tokens_M, output_MH.to(hidden_TH.dtype))


def _dispatch_any(
    experts: Any, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Return [T, H], as `expert_dispatch` does where as many tokens come as go."""
    hidden_TH = hidden_TH.to(torch.get_autocast_dtype("cpu"))
    order_S = torch.arange(experts_TK.numel())
    tokens_RH = _Exchange.apply(hidden_TH[order_S % len(hidden_TH)], len(order_S))
    ones_R1 = torch.ones(len(order_S), 1, dtype=hidden_TH.dtype)
    outputs_SH = _Exchange.apply(_compute_any(experts, tokens_RH, order_S[:, None], ones_R1), len(order_S))
    return weighed(outputs_SH, order_S, weights_TK).to(hidden_TH.dtype)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Returns rows of other ranks."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, num_received: int) -> torch.Tensor:
        context.num_sent = len(rows)
        return rows.new_empty(num_received, *rows.shape[1:])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_empty(context.num_sent, *gradient.shape[1:]), None


class _ShareOfLast(RowShare):
    """The last rank's share of a row, without the other ranks."""

    def __init__(self, num_tokens: int, *, size: int) -> None:
        super().__init__(num_tokens, size=size, number=size - 1, group=None)

    def exchange(self, rows: torch.Tensor, num_received: list[int], num_sent: list[int]) -> torch.Tensor:
        """Return as many rows as would come."""
        assert sum(num_sent) == len(rows)
        received: torch.Tensor = _Exchange.apply(rows, sum(num_received))
        return received

    def gathered(self, own: TokenLogprobs, own_O: torch.Tensor, num_predicted: int) -> TokenLogprobs:
        """Return this rank's own: others' are a few bytes for each token."""
        return own
