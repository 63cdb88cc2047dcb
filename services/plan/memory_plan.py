"""Calculates the memory of a run: of the GPU of each process, with settings that make all of them fit, and of the host.

Weights, gradients, averages, copies and caches are counted from the model's shape, activations by `working_memory`. On
several ranks the gathered part of the layers is counted too. The overhead of CUDA, NCCL and the allocator was not
measured; the trainer reserves `RESERVED_BYTES` for it, and SGLang keeps the share beyond rollout.gpu_memory_fraction.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic

from penstock.errors import ConfigError
from services.launch.gpu_plan import TRAINER, GpuPlan
from services.launch.run_plan import assign_gpus, plan_processes
from services.plan.engine_plan import plan_engine
from services.plan.host_memory import host_moments
from services.plan.model_shape import ModelShape
from services.plan.process_plan import GIB, Gpus, MemoryPlan, ProcessPlan
from services.plan.proposals import as_override, changed, proposals
from services.plan.trainer_plan import plan_trainer
from services.plan.working_memory import WorkingBytes, working_bytes
from services.recipe import Recipe
from services.rollout.engine.expert_parallel import require_whole_experts
from services.rollout.engine.linear_attention import require_servable
from services.trainer.checks.compiled import require_compilable
from services.trainer.checks.expert_parallel import require_divisible
from services.trainer.checks.sequence_parallel import require_shareable

RESERVED_BYTES = 2 * GIB
"""Reserved on each GPU that computes steps, for CUDA's context, NCCL's buffers, memory that the allocator cannot use,
and the five parts of a copy in the host's memory (80 MiB) that rank 0 has there while they are broadcast; on a shared
GPU as much again for each engine, for its context and for what it computes or a push takes."""
_NO_ROW = WorkingBytes(activations=0, logits=0)


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
    shape = ModelShape.read(model, recipe.trainer.lora)
    working = functools.cache(functools.partial(working_bytes, shape))
    plan = _plan(shape, recipe, gpus, working, image_share=image_share)
    if plan.fits:
        return plan

    def fits(settings: Mapping[str, object]) -> bool:
        try:
            other = changed(recipe, settings)
            # Without activations first: that takes no time and excludes most.
            each: tuple[Callable[..., WorkingBytes], ...] = (lambda *_, **__: _NO_ROW, working)
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
    shape: ModelShape, recipe: Recipe, gpus: Gpus, working: Callable[..., WorkingBytes], *, image_share: float
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
        attends_linearly=shape.attends_linearly,
    )
    require_servable(recipe.rollout, shape.config_json)
    require_compilable(trainer.compile, is_mixture=shape.num_experts > 0, attends_linearly=shape.attends_linearly)
    placed = _assign_gpus(recipe, gpus)
    processes: list[ProcessPlan] = []
    engines = [name for name in placed.of_process if name != TRAINER]
    if engines:
        free = RESERVED_BYTES if placed.is_shared else gpus.total_bytes - _share(recipe, gpus)
        processes.append(plan_engine(shape, recipe, gpus, count=len(engines), free_bytes=free))
    if TRAINER in placed.of_process:
        room = _room(recipe, gpus, placed, len(engines))
        processes += plan_trainer(shape, recipe, room, working, image_share=image_share)
    trained = shape.trained(trainer.optimizer.learning_rates)
    adapters = shape.adapters
    host = host_moments(
        shape.num_parameters,
        recipe,
        num_trained=shape.share_bytes(trained, 1, ranks=1, expert_parallel=1),
        num_adapters=0 if adapters is None else adapters.num_parameters,
        num_adapted=0 if adapters is None else sum(adapters.changed_sizes),
        num_engines=len(engines),
    )
    return MemoryPlan(shape=shape, processes=tuple(processes), host=host)


def _assign_gpus(recipe: Recipe, gpus: Gpus) -> GpuPlan:
    trainer, rollout = recipe.trainer, recipe.rollout
    if trainer.device == "cpu" or "float32" in (trainer.dtype, rollout.dtype):
        raise ConfigError(
            f"trainer.device = {trainer.device!r}, trainer.dtype = {trainer.dtype!r} and rollout.dtype = "
            f"{rollout.dtype!r} are not planned, only bfloat16 on GPUs is; give --trainer.device=auto "
            "--trainer.dtype=auto --rollout.dtype=auto to plan that"
        )
    devices = [str(number) for number in range(gpus.count)]
    return assign_gpus(recipe, plan_processes(recipe, own_bus=not recipe.bus.url), devices)


def _room(recipe: Recipe, gpus: Gpus, placed: GpuPlan, num_engines: int) -> int:
    room = gpus.total_bytes - RESERVED_BYTES
    if placed.is_shared:
        room -= num_engines * (_share(recipe, gpus) + RESERVED_BYTES)
    return room


def _share(recipe: Recipe, gpus: Gpus) -> int:
    """Return the bytes that an engine takes of a GPU for weights and KV cache."""
    return int(recipe.rollout.gpu_memory_fraction * gpus.total_bytes)
