"""What each process of a run takes of its GPU's memory, and settings with which all of them fit.

Weights, gradients, averages, copies and caches are counted from the model's shape, activations by `working_memory`. On
several ranks what is gathered of a layer at a time is counted too. What CUDA, NCCL and the allocator take on top was
not measured; `RESERVED_BYTES` is kept for it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError
from services.launch.gpu_plan import TRAINER, GpuPlan
from services.launch.run_plan import make_plan
from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, working_bytes
from services.recipe import Recipe

GIB = 2**30
RESERVED_BYTES = 2 * GIB
"""Of each GPU, for CUDA's context, NCCL's buffers and what the allocator cannot use."""
LEAST_ROW = 2048
"""Tokens of the shortest row that is proposed: shorter ones leave a GPU idle."""

_FLOAT32, _BFLOAT16 = 4, 2
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of one machine, all of one kind."""

    count: int
    total_bytes: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `8x80`: eight GPUs with 80 GiB each.

        Raises:
            ConfigError: it is something else.
        """
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
        if found is None or int(found[1]) < 1 or float(found[2]) <= 0:
            raise ConfigError(f"--gpus {text!r} is not like 8x80, which is eight GPUs with 80 GiB each; correct it")
        return cls(count=int(found[1]), total_bytes=int(float(found[2]) * GIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a process has in its GPU's memory when it has most of one kind."""

    name: str
    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A kind of process, and the GPU of each of it."""

    name: str
    count: int
    room_bytes: int
    """What it may take of its GPU."""
    moments: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it has room at every moment."""
        return all(moment.total_bytes <= self.room_bytes for moment in self.moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All kinds of processes of a run that compute on GPUs."""

    shape: ModelShape
    processes: tuple[ProcessPlan, ...]
    remedy: tuple[str, ...] | None = ()
    """Settings with which all would fit; empty where they do; None where none were found."""

    @property
    def fits(self) -> bool:
        """Whether every process fits."""
        return all(process.fits for process in self.processes)


def plan_memory(model: Path, recipe: Recipe, gpus: Gpus, *, image_share: float) -> MemoryPlan:
    """Plan a run, and where it does not fit look for settings with which it would, which takes up to a minute.

    Args:
        model: Folder of the recipe's model, of which `config.json` is read.
        recipe: The recipe.
        gpus: What it is to run on.
        image_share: Share of a row's tokens that stand for images.

    Raises:
        ConfigError: there are too few GPUs for the processes, the recipe computes without GPUs, or the model cannot be
            read.
    """
    _place(recipe, gpus)
    shape = ModelShape.read(model)
    working = functools.cache(functools.partial(working_bytes, shape))
    plan = _plan(shape, recipe, gpus, working, image_share=image_share)
    if plan.fits:
        return plan

    def fits(settings: Mapping[str, object]) -> bool:
        try:
            changed = _changed(recipe, settings)
            # Without activations first, which takes no time and excludes most.
            each: tuple[Callable[..., int], ...] = (lambda *_, **__: 0, working)
            return all(_plan(shape, changed, gpus, these, image_share=image_share).fits for these in each)
        except ConfigError:
            return False  # too few GPUs for it

    found = next((settings for settings in _alternatives(recipe, gpus) if fits(settings)), None)
    if found is None:
        return dataclasses.replace(plan, remedy=None)
    for name in tuple(found):
        without = {other: value for other, value in found.items() if other != name}
        if fits(without):
            found = without
    return dataclasses.replace(plan, remedy=tuple(f"--{name}={_as_text(value)}" for name, value in found.items()))


def _plan(
    shape: ModelShape, recipe: Recipe, gpus: Gpus, working: Callable[..., int], *, image_share: float
) -> MemoryPlan:
    placed = _place(recipe, gpus)
    row = _row(shape, recipe, image_share=image_share)
    processes = []
    if engines := [name for name in placed.of_process if name != TRAINER]:
        processes.append(_engine(shape, recipe, gpus, count=len(engines)))
    if TRAINER in placed.of_process:
        processes += _trainer(shape, recipe, gpus, placed, working, row, num_engines=len(engines))
    return MemoryPlan(shape=shape, processes=tuple(processes))


def _place(recipe: Recipe, gpus: Gpus) -> GpuPlan:
    if recipe.trainer.device == "cpu" or recipe.trainer.dtype == "float32":
        raise ConfigError(
            f"trainer.device = {recipe.trainer.device!r} and trainer.dtype = {recipe.trainer.dtype!r} are not planned, "
            "only bfloat16 on GPUs is; give --trainer.device=auto --trainer.dtype=auto to plan that"
        )
    return make_plan(recipe, [str(number) for number in range(gpus.count)], own_bus=not recipe.bus.url).gpus


def _row(shape: ModelShape, recipe: Recipe, *, image_share: float) -> RowShape:
    """The longest row: micro_batch_tokens, or a sample that is longer."""
    num_tokens = max(recipe.trainer.micro_batch_tokens, recipe.rollout.context_length)
    return RowShape(
        num_tokens=num_tokens,
        num_image_tokens=0 if shape.vision is None else int(num_tokens * image_share),
        num_responses=recipe.trainer.samples_per_group,
    )


def _engine(shape: ModelShape, recipe: Recipe, gpus: Gpus, *, count: int) -> ProcessPlan:
    rollout = recipe.rollout
    size = _DTYPE_BYTES.get(shape.dtype if rollout.dtype == "auto" else rollout.dtype, _BFLOAT16)
    weights = size * shape.num_parameters // rollout.tensor_parallel
    heads = shape.text.num_key_value_heads
    per_token = size * shape.kv_values // heads * math.ceil(heads / rollout.tensor_parallel)
    room = int(rollout.gpu_memory_fraction * gpus.total_bytes)
    num_tokens = max(0, room - weights) // per_token
    if rollout.max_total_tokens:
        num_tokens = min(num_tokens, rollout.max_total_tokens)
    wanted = rollout.context_length or int(shape.text.max_position_embeddings)
    notes = [f"its KV cache holds {num_tokens:,} tokens, {num_tokens / wanted:,.1f} requests of {wanted:,}"]
    if num_tokens < wanted:
        notes.append("one request of the greatest length does not fit")
    cache = Part(name=f"KV cache, at least one request of {wanted:,} tokens", size_bytes=wanted * per_token)
    return ProcessPlan(
        name="engine" if rollout.tensor_parallel == 1 else f"GPU of an engine of {rollout.tensor_parallel}",
        count=count * rollout.tensor_parallel,
        room_bytes=room,
        moments=(Moment(name="while it serves", parts=(Part(name="weights", size_bytes=weights), cache)),),
        notes=tuple(notes),
    )


def _trainer(
    shape: ModelShape,
    recipe: Recipe,
    gpus: Gpus,
    placed: GpuPlan,
    working: Callable[..., int],
    row: RowShape,
    *,
    num_engines: int,
) -> Iterator[ProcessPlan]:
    trainer = recipe.trainer
    room = gpus.total_bytes - RESERVED_BYTES
    if placed.is_shared:
        room -= int(num_engines * recipe.rollout.gpu_memory_fraction * gpus.total_bytes)
    is_sharded = trainer.ranks > 1
    offloads = trainer.optimizer.offload
    if is_sharded and offloads:
        raise ConfigError("trainer.optimizer.offload is of one rank; leave it out, or set trainer.ranks = 1")
    activations_bytes = working(
        row,
        learning_rates=tuple(trainer.optimizer.learning_rates.items()),
        gradient_checkpointing=trainer.gradient_checkpointing,
        float32_head=trainer.float32_head,
        keeps_all=not is_sharded and not offloads,
    )
    standing = _standing(shape, recipe)
    pushed = Part(name="copy that was pushed", size_bytes=_BFLOAT16 * shape.num_parameters)
    activations = Part(
        name=f"activations of {row.num_tokens:,} tokens, {row.num_image_tokens:,} of images",
        size_bytes=activations_bytes,
    )
    gathered = tuple(_gathered(shape)) if is_sharded else ()
    step = Moment(name="in a step", parts=(*standing, *gathered, activations))
    notes = (f"{activations_bytes / row.num_tokens / 2**20:.2f} MiB of activations for each token of a row",)
    without_gradients = (part for part in standing if not part.name.startswith("gradients"))
    push = Moment(name="before a push", parts=(*without_gradients, *_pushing(shape, recipe)))
    first = dataclasses.replace(step, parts=(*step.parts, pushed))
    yield ProcessPlan(
        name="rank 0 of the trainer" if is_sharded else "trainer",
        count=1,
        room_bytes=room,
        moments=(first, push),
        notes=notes,
    )
    if is_sharded:
        yield ProcessPlan(name="other rank", count=trainer.ranks - 1, room_bytes=room, moments=(step,), notes=notes)


def _standing(shape: ModelShape, recipe: Recipe) -> list[Part]:
    """What a rank's device has in every step."""
    trainer = recipe.trainer
    trained = shape.num_trained(trainer.optimizer.learning_rates)
    total = shape.num_parameters
    if trainer.optimizer.offload:
        parts = [Part(name="weights in bfloat16", size_bytes=_BFLOAT16 * total)]
        reference = _BFLOAT16 * total
    else:
        of = "" if trainer.ranks == 1 else f", 1/{trainer.ranks} of them"
        parts = [
            Part(name=f"weights in float32{of}", size_bytes=_FLOAT32 * total // trainer.ranks),
            Part(name=f"gradients{of}", size_bytes=_FLOAT32 * trained // trainer.ranks),
            Part(name=f"AdamW's averages{of}", size_bytes=2 * _FLOAT32 * trained // trainer.ranks),
        ]
        reference = _FLOAT32 * total // trainer.ranks
    if recipe.algorithm.needs_reference:
        parts.append(Part(name="reference policy", size_bytes=reference))
    return parts


def _gathered(shape: ModelShape) -> Iterator[Part]:
    """What several ranks gather: all but the text's layers for a whole pass, two layers at a time, and a layer's
    gradient as it was computed and as it is summed."""
    others = shape.num_parameters - shape.num_of_text_layers
    yield Part(name="gathered embedding, tower and head", size_bytes=_BFLOAT16 * others)
    yield Part(name="two gathered layers", size_bytes=2 * _BFLOAT16 * shape.num_of_layer)
    yield Part(name="gradients on their way", size_bytes=(_BFLOAT16 + _FLOAT32) * max(shape.num_of_layer, others))


def _pushing(shape: ModelShape, recipe: Recipe) -> Iterator[Part]:
    size = _BFLOAT16 * shape.num_parameters
    yield Part(name="copy that was pushed", size_bytes=size)
    if not recipe.trainer.optimizer.offload:
        yield Part(name="weights rounded", size_bytes=size)
    yield Part(name="copy to be pushed", size_bytes=size)


def _alternatives(recipe: Recipe, gpus: Gpus) -> Iterator[dict[str, object]]:
    """Settings to try, the least costly first. Most keep those before them."""
    trainer, rollout = recipe.trainer, recipe.rollout
    settings: dict[str, object] = {}
    if not trainer.gradient_checkpointing:
        settings |= {"trainer.gradient_checkpointing": True}
        yield settings
    tokens = trainer.micro_batch_tokens
    while tokens // 2 >= max(LEAST_ROW, rollout.context_length):
        tokens //= 2
        settings |= {"trainer.micro_batch_tokens": tokens}
        yield settings
    num_engines = rollout.replicas + rollout.prefill + rollout.decode

    def with_ranks(parallel: int) -> Iterator[dict[str, object]]:
        ranks = max(2, trainer.ranks)
        while num_engines * parallel + ranks <= gpus.count:
            yield settings | {"trainer.ranks": ranks}
            ranks *= 2

    yield from with_ranks(rollout.tensor_parallel)
    if trainer.ranks == 1:
        yield settings | {"trainer.optimizer.offload": True}
    parallel = 2 * rollout.tensor_parallel
    while num_engines * parallel + trainer.ranks <= gpus.count:
        settings |= {"rollout.tensor_parallel": parallel}
        yield settings
        yield from with_ranks(parallel)
        parallel *= 2


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changed(recipe: Recipe, settings: Mapping[str, object]) -> Recipe:
    data = recipe.model_dump()
    for name, value in settings.items():
        *sections, last = name.split(".")
        section = data
        for key in sections:
            section = section[key]
        section[last] = value
    return Recipe(**data)
