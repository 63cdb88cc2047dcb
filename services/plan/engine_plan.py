"""Calculates the memory of an engine's GPUs."""

import math
import re

from services.plan.linear_attention.states import LinearStates
from services.plan.model_shape import ModelShape
from services.plan.moment import Moment, Part
from services.plan.process_plan import Gpus, ProcessPlan
from services.plan.push_buffers import push_bytes
from services.plan.row_shapes import longest_sample
from services.recipe import Recipe

_BFLOAT16 = 2
_WHOLE = re.compile(r"norm\d?\.|\.gate\.weight$|patch_embed\.|\.(proj|linear_fc2|down_proj)\.bias$")
"""Names of weights that each process of an engine has whole."""


def plan_engine(shape: ModelShape, recipe: Recipe, gpus: Gpus, *, count: int, free_bytes: int) -> ProcessPlan:
    """Return the plan of each GPU of `count` engines, of which `free_bytes` are free beside an engine's share."""
    rollout = recipe.rollout
    weights = _weights(shape, rollout.tensor_parallel)
    heads = shape.text.num_key_value_heads
    per_token = _BFLOAT16 * shape.kv_values // heads * math.ceil(heads / rollout.tensor_parallel)
    room = int(rollout.gpu_memory_fraction * gpus.total_bytes)
    states = LinearStates.of(shape.text, rollout) if shape.attends_linearly else None
    beside = room - weights
    num_states = 0 if states is None else states.num_in(beside)
    num_tokens = max(0, beside - (0 if states is None else states.bytes_of(num_states))) // per_token
    longest, is_bound = longest_sample(recipe)
    if rollout.max_total_tokens:
        num_tokens = min(num_tokens, rollout.max_total_tokens)
        longest = min(longest, rollout.max_total_tokens)
    notes = [f"its KV cache holds {num_tokens:,} tokens, {num_tokens / longest:,.1f} samples of {longest:,}"]
    if states is not None:
        notes.append(states.note(num_states))
    if not is_bound:
        notes.append("samples may be longer: neither rollout.context_length nor data.limits.max_tokens is set")
    cache = Part(name=f"KV cache of one sample of {longest:,} tokens", size_bytes=longest * per_token)
    of_states = () if states is None else tuple(states.least_parts(cache.size_bytes))
    return ProcessPlan(
        name="engine" if rollout.tensor_parallel == 1 else f"GPU of an engine of {rollout.tensor_parallel}",
        count=count * rollout.tensor_parallel,
        room_bytes=room,
        moments=(
            Moment(name="at least", parts=(Part(name="weights", size_bytes=weights), cache, *of_states)),
            Moment(
                name="in a push, beside its share of the GPU",
                parts=(
                    Part(name="push buffers", size_bytes=push_bytes(shape, tensor_parallel=rollout.tensor_parallel)),
                ),
                room_bytes=free_bytes,
            ),
        ),
        notes=tuple(notes),
    )


def _weights(shape: ModelShape, tensor_parallel: int) -> int:
    """Return the bytes of a process's weights: SGLang divides all matrices but those of routers and of the patches."""
    whole = sum(size for name, size in shape.sizes if _WHOLE.search(name))
    return _BFLOAT16 * (whole + (shape.num_parameters - whole) // tensor_parallel)
