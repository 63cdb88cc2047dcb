"""Calculates the memory of a run: of the GPU of each process, with settings that make all of them fit, and of the host.

Weights, gradients, averages, copies and caches are counted from the model's shape, activations by `working_memory`. On
several ranks the gathered part of the layers is counted too. The overhead of CUDA, NCCL and the allocator was not
measured; the trainer reserves `RESERVED_BYTES` for it, and SGLang keeps the share beyond rollout.gpu_memory_fraction.
"""

import dataclasses
import functools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pydantic

from penstock.errors import ConfigError
from services.launch.gpu_plan import TRAINER, GpuPlan
from services.launch.run_plan import assign_gpus, plan_processes
from services.plan.host_memory import host_moments
from services.plan.model_shape import ModelShape
from services.plan.moment import Moment, Part
from services.plan.process_plan import GIB, Gpus, MemoryPlan, ProcessPlan
from services.plan.proposals import as_override, changed, proposals
from services.plan.row_shapes import longest_row, longest_sample, row_of_demonstrations
from services.plan.working_memory import RowShape, working_bytes
from services.recipe import Recipe
from services.rollout.engine.expert_parallel import require_whole_experts
from services.trainer.checks.expert_parallel import require_divisible
from services.trainer.checks.sequence_parallel import require_shareable
from services.trainer.config import LoraConfig

RESERVED_BYTES = 2 * GIB
"""Reserved on each GPU that computes steps, for CUDA's context, NCCL's buffers and memory that the allocator cannot
use; on a shared GPU as much again for each engine, for its context and its computation."""

_FLOAT32, _BFLOAT16 = 4, 2


def plan_memory(model: Path, recipe: Recipe, gpus: Gpus, *, image_share: float) -> MemoryPlan:
    """Plan a run; if it does not fit, search for settings with which it would, which takes up to a minute.

    Args:
        model: Folder of the recipe's model, of which only `config.json` is read.
        recipe: The recipe.
        gpus: The GPUs to run on.
        image_share: Share of a row's tokens that stand for images, 0 to 0.9.

    Raises:
        ConfigError: there are too few GPUs for the processes, the recipe computes without GPUs, its settings exclude
            each other, or the model cannot be read.
    """
    _assign_gpus(recipe, gpus)
    shape = ModelShape.read(model)
    working = functools.cache(functools.partial(working_bytes, shape))
    plan = _plan(shape, recipe, gpus, working, image_share=image_share)
    if plan.fits:
        return plan

    def fits(settings: Mapping[str, object]) -> bool:
        try:
            other = changed(recipe, settings)
            # Without activations first: that takes no time and excludes most.
            each: tuple[Callable[..., int], ...] = (lambda *_, **__: 0, working)
            return all(_plan(shape, other, gpus, these, image_share=image_share).fits for these in each)
        except (ConfigError, pydantic.ValidationError):
            return False  # too few GPUs, or settings that exclude each other

    found = next((settings for settings in proposals(recipe, gpus) if fits(settings)), None)
    if found is None:
        return dataclasses.replace(plan, remedy=None)
    for name in tuple(found):
        without = {other: value for other, value in found.items() if other != name}
        if fits(without):
            found = without
    return dataclasses.replace(plan, remedy=tuple(as_override(name, value) for name, value in found.items()))


def _plan(
    shape: ModelShape, recipe: Recipe, gpus: Gpus, working: Callable[..., int], *, image_share: float
) -> MemoryPlan:
    shape.require_divisible(recipe.rollout.tensor_parallel)
    require_whole_experts(recipe.rollout.expert_parallel, num_experts=shape.num_experts)
    trainer = recipe.trainer
    require_divisible(trainer.expert_parallel, num_ranks=trainer.ranks, num_experts=shape.num_experts)
    require_shareable(
        trainer.sequence_parallel,
        num_ranks=trainer.ranks,
        num_heads=int(shape.text.num_attention_heads),
        num_kv_heads=int(shape.text.num_key_value_heads),
    )
    placed = _assign_gpus(recipe, gpus)
    processes = []
    engines = [name for name in placed.of_process if name != TRAINER]
    if engines:
        processes.append(_engine(shape, recipe, gpus, count=len(engines)))
    if TRAINER in placed.of_process:
        room = _room(recipe, gpus, placed, len(engines))
        processes += _trainer(shape, recipe, room, working, image_share=image_share)
    trained = shape.trained(trainer.optimizer.learning_rates)
    num_trained = sum(size for name, size in shape.sizes if name in trained)
    host = host_moments(shape.num_parameters, recipe, num_trained=num_trained, num_engines=len(engines))
    return MemoryPlan(shape=shape, processes=tuple(processes), host=host)


def _assign_gpus(recipe: Recipe, gpus: Gpus) -> GpuPlan:
    trainer, rollout = recipe.trainer, recipe.rollout
    if trainer.device == "cpu" or "float32" in (trainer.dtype, rollout.dtype):
        raise ConfigError(
            f"trainer.device = {trainer.device!r}, trainer.dtype = {trainer.dtype!r} and rollout.dtype = "
            f"{rollout.dtype!r} are not planned, only bfloat16 on GPUs is; give --trainer.device=auto "
            "--trainer.dtype=auto --rollout.dtype=auto to plan that"
        )
    if trainer.lora.rank:
        raise ConfigError(
            f"trainer.lora.rank = {trainer.lora.rank} is not planned yet; plan the run without it, which needs more "
            f"memory in the trainer: {_without_adapters(trainer.lora)}"
        )
    devices = [str(number) for number in range(gpus.count)]
    return assign_gpus(recipe, plan_processes(recipe, own_bus=not recipe.bus.url), devices)


def _without_adapters(lora: LoraConfig) -> str:
    """Return the overrides that take adapters out of a recipe."""
    defaults, own = (each.model_dump(mode="json") for each in (LoraConfig(), lora))
    given = {name: value for name, value in defaults.items() if own[name] != value}
    return " ".join(shlex.quote(f"--trainer.lora.{name}={json.dumps(value)}") for name, value in given.items())


def _room(recipe: Recipe, gpus: Gpus, placed: GpuPlan, num_engines: int) -> int:
    room = gpus.total_bytes - RESERVED_BYTES
    if placed.is_shared:
        room -= num_engines * (int(recipe.rollout.gpu_memory_fraction * gpus.total_bytes) + RESERVED_BYTES)
    return room


def _engine(shape: ModelShape, recipe: Recipe, gpus: Gpus, *, count: int) -> ProcessPlan:
    rollout = recipe.rollout
    weights = _BFLOAT16 * shape.num_parameters // rollout.tensor_parallel
    heads = shape.text.num_key_value_heads
    per_token = _BFLOAT16 * shape.kv_values // heads * math.ceil(heads / rollout.tensor_parallel)
    room = int(rollout.gpu_memory_fraction * gpus.total_bytes)
    num_tokens = max(0, room - weights) // per_token
    longest, is_bound = longest_sample(recipe)
    if rollout.max_total_tokens:
        num_tokens = min(num_tokens, rollout.max_total_tokens)
        longest = min(longest, rollout.max_total_tokens)
    notes = [f"its KV cache holds {num_tokens:,} tokens, {num_tokens / longest:,.1f} samples of {longest:,}"]
    if rollout.tensor_parallel > 1:
        notes.append(_of_engines_push(shape, recipe, gpus))
    if not is_bound:
        notes.append("samples may be longer: neither rollout.context_length nor data.limits.max_tokens is set")
    cache = Part(name=f"KV cache of one sample of {longest:,} tokens", size_bytes=longest * per_token)
    return ProcessPlan(
        name="engine" if rollout.tensor_parallel == 1 else f"GPU of an engine of {rollout.tensor_parallel}",
        count=count * rollout.tensor_parallel,
        room_bytes=room,
        moments=(Moment(name="at least", parts=(Part(name="weights", size_bytes=weights), cache)),),
        notes=tuple(notes),
    )


def _of_engines_push(shape: ModelShape, recipe: Recipe, gpus: Gpus) -> str:
    """Describe the memory that a push takes of the part that an engine leaves free on each of its several GPUs."""
    rollout = recipe.rollout
    largest = _BFLOAT16 * max(size for _, size in shape.sizes)
    taken = (2 + 1 / rollout.tensor_parallel) * largest / GIB  # the largest whole, plus all its shards
    free = (1 - rollout.gpu_memory_fraction) * gpus.total_bytes / GIB
    return f"a push takes {taken:,.1f} GiB of the {free:,.1f} that rollout.gpu_memory_fraction leaves"


def _activations(
    shape: ModelShape, recipe: Recipe, working: Callable[..., int], *, image_share: float
) -> tuple[Part, list[str]]:
    """Return the activations of the row that takes most of them, and notes on it: rows are computed one by one."""
    trainer = recipe.trainer

    def size_of(row: RowShape) -> int:
        return working(
            row,
            learning_rates=tuple(trainer.optimizer.learning_rates.items()),
            gradient_checkpointing=trainer.gradient_checkpointing,
            float32_head=trainer.float32_head,
            dispatches_tokens=trainer.expert_parallel > 1,
            sequence_parallel=trainer.sequence_parallel,
        )

    row, what = longest_row(shape, recipe, image_share=image_share), ""
    size_bytes = size_of(row)
    notes = []
    if not longest_sample(recipe)[1]:
        notes.append(f"a sample of more than {row.num_tokens:,} tokens takes more")
    learned = row_of_demonstrations(shape, recipe, image_share=image_share)
    if learned is not None:
        if (more := size_of(learned)) > size_bytes:
            row, what, size_bytes = learned, " of demonstrations", more
        if recipe.demonstrations is not None and not recipe.demonstrations.max_tokens:
            notes.append(
                f"a demonstration of more than {learned.num_tokens:,} tokens takes more; demonstrations.max_tokens "
                "bounds them"
            )
    notes.insert(0, f"{size_bytes / row.num_tokens / 2**20:.2f} MiB of activations for each token of a row{what}")
    share = "" if trainer.sequence_parallel == 1 else f"a share of 1/{trainer.sequence_parallel} of "
    name = f"activations of {share}{row.num_tokens:,} tokens{what}, {row.num_image_tokens:,} of images"
    return Part(name=name, size_bytes=size_bytes), notes


def _trainer(
    shape: ModelShape, recipe: Recipe, room: int, working: Callable[..., int], *, image_share: float
) -> Iterator[ProcessPlan]:
    trainer = recipe.trainer
    is_sharded = trainer.ranks > 1
    activations, notes = _activations(shape, recipe, working, image_share=image_share)
    resident, gradients, reference = _resident(shape, recipe)
    if is_sharded:
        moments = _sharded_moments(
            shape, (*resident, gradients), reference, activations, expert_parallel=trainer.expert_parallel
        )
        if trainer.expert_parallel > 1:
            notes.append(
                "activations are those of evenly used experts; a rank whose experts are chosen more takes more"
            )
    else:
        moments = (Moment(name="in a step", parts=(*resident, gradients, *reference, activations)),)
    pushed = tuple(_pushed(shape, recipe))
    of_first = tuple(dataclasses.replace(moment, parts=(*moment.parts, *pushed)) for moment in moments)
    push = Moment(name="before a push", parts=(*resident, *pushed, *_pushing(shape, recipe)))
    yield ProcessPlan(
        name="rank 0 of the trainer" if is_sharded else "trainer",
        count=1,
        room_bytes=room,
        moments=(*of_first, push),
        notes=tuple(notes),
    )
    if is_sharded:
        name = "other rank of the trainer"
        yield ProcessPlan(name=name, count=trainer.ranks - 1, room_bytes=room, moments=moments, notes=tuple(notes))


def _resident(shape: ModelShape, recipe: Recipe) -> tuple[tuple[Part, ...], Part, tuple[Part, ...]]:
    """Return a rank's permanent parts; its part from a step's first row on; and the reference policy, if any."""
    trainer, total = recipe.trainer, shape.num_parameters
    trained = shape.trained(trainer.optimizer.learning_rates)
    has_reference = recipe.algorithm.needs_reference
    if trainer.optimizer.offload and trainer.ranks > 1:
        weights, gradients, reference = (
            Part(name=f"{name}, on the host", size_bytes=0)
            for name in ("weights and AdamW's averages", "gradients", "reference policy")
        )
        return (weights,), gradients, (reference,) * has_reference
    if trainer.optimizer.offload:
        weights = Part(name="weights in bfloat16", size_bytes=_BFLOAT16 * total)
        reference = Part(name="reference policy", size_bytes=_BFLOAT16 * total)
        return (weights,), Part(name="gradients, on the host", size_bytes=0), (reference,) * has_reference
    num_shards = trainer.num_shards
    of = "" if num_shards == 1 else f", 1/{num_shards} of them"
    ranks = {"ranks": num_shards, "expert_parallel": trainer.expert_parallel}
    share = shape.share_bytes({name for name, _ in shape.sizes}, _FLOAT32, **ranks)
    of_trained = shape.share_bytes(trained, _FLOAT32, **ranks)
    resident: tuple[Part, ...] = (
        Part(name=f"weights in float32{of}", size_bytes=share),
        Part(name=f"AdamW's averages{of}", size_bytes=2 * of_trained),
    )
    if trainer.ranks == 1:
        resident = (*resident, Part(name="the weights in bfloat16", size_bytes=_BFLOAT16 * total))
        share = _BFLOAT16 * total
    reference = Part(name=f"reference policy{of}", size_bytes=share)
    return resident, Part(name=f"gradients{of}", size_bytes=of_trained), (reference,) * has_reference


def _sharded_moments(
    shape: ModelShape,
    resident: tuple[Part, ...],
    reference: tuple[Part, ...],
    activations: Part,
    *,
    expert_parallel: int,
) -> tuple[Moment, ...]:
    """Return moments of a step on several ranks: text layers are gathered one by one, all else for the whole pass.

    Of a layer's experts a rank gathers only those that it owns.
    """
    others, experts = shape.num_parameters - shape.num_of_text_layers, shape.num_of_layers_experts
    layer = shape.num_of_largest_layer - experts + experts // expert_parallel
    gathered = Part(name="gathered embedding, tower and head", size_bytes=_BFLOAT16 * others)
    layers = Part(name="two gathered layers", size_bytes=2 * _BFLOAT16 * layer)
    of_layer = Part(name="a layer's gradients, made and summed", size_bytes=(_BFLOAT16 + _FLOAT32) * layer)
    of_others = Part(name="gradients of embedding, tower and head", size_bytes=_BFLOAT16 * others)
    summed = Part(name="the same, to be summed", size_bytes=_FLOAT32 * others)
    moments = [
        Moment(
            name="back through the layers",
            parts=(*resident, gathered, layers, of_layer, of_others, activations),
        ),
        Moment(name="at the end of the way back", parts=(*resident, gathered, of_others, summed)),
    ]
    if reference:
        moments.append(Moment(name="while the reference computes", parts=(*resident, *reference, gathered, layers)))
    return tuple(moments)


def _pushed(shape: ModelShape, recipe: Recipe) -> Iterator[Part]:
    """Yield the copies of the replicas' version that stay on the trainer's GPU."""
    size = 0 if recipe.trainer.keeps_copies_on_host else _BFLOAT16 * shape.num_parameters
    where = ", on the host" if recipe.trainer.keeps_copies_on_host else ""
    yield Part(name=f"copy that was pushed{where}", size_bytes=size)
    if recipe.trainer.weight_sync.transport == "delta":
        yield Part(name=f"copy before it, for deltas{where}", size_bytes=size)


def _pushing(shape: ModelShape, recipe: Recipe) -> Iterator[Part]:
    """Yield a snapshot's additional parts: the whole copy, a bucket, or of several ranks the rows that each writes."""
    trainer = recipe.trainer
    name, largest = max(shape.sizes, key=lambda each: each[1])
    if not trainer.keeps_copies_on_host:
        yield Part(name="copy to be pushed", size_bytes=_BFLOAT16 * shape.num_parameters)
    elif trainer.ranks == 1:
        yield Part(name="largest weight, packed", size_bytes=_BFLOAT16 * largest)
    elif not trainer.optimizer.offload:
        share = shape.share_bytes({name}, _BFLOAT16, ranks=trainer.num_shards, expert_parallel=trainer.expert_parallel)
        yield Part(name="share of the largest weight, rounded", size_bytes=share)
