"""Calculates the memory that a run takes of its host, beside that of its GPUs.

A trainer of one rank loads the whole model in float32 into the host's memory. Of several ranks, each reads its shard
tensor by tensor. With adapters it also reads some tensors whole, one at a time, which is not counted. Engines on GPUs
map the weight files, whose pages the kernel can reclaim, so only their processes count. The memory of a process without
weights was measured on a CPU; CUDA's own share comes on top.
"""

from collections.abc import Iterator

from penstock.model.precision import resolve_dtype
from services.plan.held_out_copy import HELD_OUT_COPY, may_need_held_out_copy
from services.plan.moment import Moment, Part
from services.recipe import Recipe

ENGINE_BYTES = int(1.2 * 2**30)
"""An engine's processes in addition to its weights, measured with the tiny model on a CPU."""
OTHERS_BYTES = int(1.2 * 2**30)
"""The trainer beside its weights (0.9 GiB), and all processes without weights; measured likewise."""
RANK_BYTES = int(0.9 * 2**30)
"""A further rank of the trainer beside its weights: at most what the trainer takes."""

_FLOAT32 = 4
_AVERAGES = 8
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def host_moments(
    num_parameters: int,
    recipe: Recipe,
    *,
    num_trained: int,
    num_adapters: int = 0,
    num_adapted: int = 0,
    num_engines: int,
    engines_on_gpu: bool = True,
    trainer_on_gpu: bool = True,
    is_sft: bool = False,
) -> tuple[Moment, ...]:
    """Return what all processes of a run take together, at the moments that may be the fullest.

    Args:
        num_parameters: Of the model.
        num_trained: Those with a learning rate, which have gradients and averages.
        num_adapters: Parameters of the adapters (LoRA); 0: too few to count, or none.
        num_adapted: Those of the matrices that adapters (LoRA) change.
        recipe: The recipe. Its `trainer.ranks` are taken to be all the ranks, on one machine.
        num_engines: Engines of the run.
        engines_on_gpu: Whether engines hold their weights on GPUs.
        trainer_on_gpu: Whether the trainer computes on GPUs.
        is_sft: Whether `penstock sft` will run, which pushes no weights and has no reference policy.
    """
    common = tuple(
        _common(num_parameters, recipe, num_adapted=num_adapted, num_engines=num_engines, on_gpu=engines_on_gpu)
    )
    ranks, has_adapters = recipe.trainer.ranks, recipe.trainer.lora.rank > 0
    has_reference = recipe.algorithm.needs_reference and not is_sft
    whole = _FLOAT32 * num_parameters
    own = _FLOAT32 * num_adapters if has_adapters else whole
    copies = recipe.trainer.hsdp_replicas if ranks > 1 else 1
    of_reference = "adapters" if has_adapters else "policy"
    reference = (Part(name=f"reference {of_reference} in float32", size_bytes=copies * own),) * has_reference
    held_here = not trainer_on_gpu or recipe.trainer.optimizer.offload
    weights = (Part(name="weights in float32", size_bytes=copies * whole),) * held_here
    if held_here and has_adapters:
        rounded = _dtype_bytes(recipe, on_gpu=trainer_on_gpu) * num_parameters
        base = Part(name="base of the adapters", size_bytes=copies * rounded)
        weights = (base, Part(name="adapters in float32", size_bytes=copies * own))
    moments = []
    first_values = (Part(name="what adapters begin with", size_bytes=ranks * own),) * has_adapters
    if ranks == 1:
        loaded = Part(name="model in float32", size_bytes=whole + own * has_adapters)
        moments.append(Moment(name="when the trainer starts", parts=(*common, loaded, *first_values)))
    elif first_values:
        moments.append(Moment(name="when the trainer starts", parts=(*common, *weights, *first_values)))
    of_step = [*common, *weights, *reference]
    if held_here:
        of_step.append(Part(name="gradients", size_bytes=copies * _FLOAT32 * num_trained))
        of_step.append(Part(name="AdamW's averages", size_bytes=copies * _AVERAGES * num_trained))
    if not is_sft and (recipe.trainer.keeps_copies_on_host or not trainer_on_gpu):
        pushed = own if has_adapters else _dtype_bytes(recipe, on_gpu=trainer_on_gpu) * num_parameters
        of_step += _copies(pushed, recipe)
    if ranks > 1:
        size = (1 + has_reference) * own + _AVERAGES * num_trained
        of_step.append(Part(name="checkpoint that is being written", size_bytes=size))
    moments.append(Moment(name="in a step", parts=tuple(of_step)))
    return tuple(moments)


def _common(num_parameters: int, recipe: Recipe, *, num_adapted: int, num_engines: int, on_gpu: bool) -> Iterator[Part]:
    further = recipe.trainer.ranks - 1
    yield Part(
        name="processes without weights",
        size_bytes=num_engines * ENGINE_BYTES + OTHERS_BYTES + further * RANK_BYTES,
    )
    per_weight = _DTYPE_BYTES[resolve_dtype(recipe.rollout.dtype, on_gpu=on_gpu)]
    if num_engines and not on_gpu:
        yield Part(name="engines' weights", size_bytes=num_engines * per_weight * num_parameters)
    if num_engines and num_adapted:
        yield Part(name="engines' matrices without adapters", size_bytes=num_engines * per_weight * num_adapted)


def _copies(size_bytes: int, recipe: Recipe) -> Iterator[Part]:
    """Yield the copies of weights for pushes: the replicas' version, the one to be pushed, and an evaluation's."""
    num = 3 if recipe.trainer.weight_sync.transport == "delta" else 2
    yield Part(name=f"{num} copies of the weights for pushes", size_bytes=num * size_bytes)
    if may_need_held_out_copy(recipe):
        yield Part(name=HELD_OUT_COPY, size_bytes=size_bytes)


def _dtype_bytes(recipe: Recipe, *, on_gpu: bool) -> int:
    """Return the bytes of a weight in the precision that the trainer computes in."""
    return _DTYPE_BYTES[resolve_dtype(recipe.trainer.dtype, on_gpu=on_gpu)]
