"""Calculates the memory of the GPUs of the trainer's ranks."""

import dataclasses
from collections.abc import Callable, Iterator

from penstock.weights.manifest import MAX_BUCKET_BYTES
from services.plan.held_out_copy import HELD_OUT_COPY, may_need_held_out_copy
from services.plan.model_shape import ModelShape
from services.plan.moment import Moment, Part
from services.plan.process_plan import ProcessPlan
from services.plan.row_shapes import longest_row, longest_sample, row_of_demonstrations
from services.plan.working_memory import RowShape, WorkingBytes
from services.recipe import Recipe

_FLOAT32, _BFLOAT16 = 4, 2


def plan_trainer(
    shape: ModelShape, recipe: Recipe, room: int, working: Callable[..., WorkingBytes], *, image_share: float
) -> Iterator[ProcessPlan]:
    """Yield the plan of rank 0, and that of the other ranks if there are any.

    Args:
        shape: Shape of the model.
        recipe: The recipe.
        room: Bytes of a GPU that a rank may take.
        working: `working_bytes` of this model.
        image_share: Share of a row's tokens that stand for images.
    """
    trainer = recipe.trainer
    is_sharded = trainer.ranks > 1
    activations, notes = _activations(shape, recipe, working, image_share=image_share)
    resident, gradients, reference = _resident(shape, recipe)
    if is_sharded:
        moments = _sharded_moments(
            shape,
            (*resident, gradients),
            reference,
            activations,
            num_shards=trainer.num_shards,
            expert_parallel=trainer.expert_parallel,
        )
        if trainer.expert_parallel > 1:
            notes.append(
                "activations are those of evenly used experts; a rank whose experts are chosen more takes more"
            )
    else:
        moments = (Moment(name="in a step", parts=(*resident, gradients, *reference, *activations)),)
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


def _activations(
    shape: ModelShape, recipe: Recipe, working: Callable[..., WorkingBytes], *, image_share: float
) -> tuple[tuple[Part, ...], list[str]]:
    """Return the activations and logits of the row that takes most, and notes on it: rows are computed one by one."""
    trainer = recipe.trainer

    def size_of(row: RowShape) -> WorkingBytes:
        return working(
            row,
            learning_rates=tuple(trainer.optimizer.learning_rates.items()),
            gradient_checkpointing=trainer.gradient_checkpointing,
            float32_head=trainer.float32_head,
            dispatches_tokens=trainer.expert_parallel > 1,
            sequence_parallel=trainer.sequence_parallel,
            is_sharded=trainer.ranks > 1,
        )

    row, what = longest_row(shape, recipe, image_share=image_share), ""
    size = size_of(row)
    notes = []
    if not longest_sample(recipe)[1]:
        notes.append(f"a sample of more than {row.num_tokens:,} tokens takes more")
    learned = row_of_demonstrations(shape, recipe, image_share=image_share)
    if learned is not None:
        if (more := size_of(learned)).total > size.total:
            row, what, size = learned, " of demonstrations", more
        if recipe.demonstrations is not None and not recipe.demonstrations.max_tokens:
            notes.append(
                f"a demonstration of more than {learned.num_tokens:,} tokens takes more; demonstrations.max_tokens "
                "bounds them"
            )
    per_token = f"{size.total / row.num_tokens / 2**20:.2f} MiB"
    notes.insert(0, f"{per_token} of activations and logits for each token of a row{what}")
    share = "" if trainer.sequence_parallel == 1 else f"a share of 1/{trainer.sequence_parallel} of "
    name = f"activations of {share}{row.num_tokens:,} tokens{what}, {row.num_image_tokens:,} of images"
    logits = Part(name=f"logits{'' if size.logits else ', gone at that moment'}", size_bytes=size.logits)
    return (Part(name=name, size_bytes=size.activations), logits), notes


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
    names = {name for name, _ in shape.sizes}
    of_trained = shape.share_bytes(trained, _FLOAT32, **ranks)
    gradients = Part(name=f"gradients{of}", size_bytes=of_trained)
    averages = Part(name=f"AdamW's averages{of}", size_bytes=2 * of_trained)
    if shape.adapters is not None:
        base = Part(name=f"base in bfloat16{of}", size_bytes=shape.share_bytes(names, _BFLOAT16, **ranks))
        share = shape.share_bytes(shape.adapters.names, _FLOAT32, **ranks)
        reference = Part(name=f"reference adapters{of}", size_bytes=share)
        adapters = Part(name=f"adapters in float32{of}", size_bytes=share)
        return (base, adapters, averages), gradients, (reference,) * has_reference
    share = shape.share_bytes(names, _FLOAT32, **ranks)
    resident: tuple[Part, ...] = (Part(name=f"weights in float32{of}", size_bytes=share), averages)
    if trainer.ranks == 1:
        resident = (*resident, Part(name="the weights in bfloat16", size_bytes=_BFLOAT16 * total))
        share = _BFLOAT16 * total
    reference = Part(name=f"reference policy{of}", size_bytes=share)
    return resident, gradients, (reference,) * has_reference


def _sharded_moments(
    shape: ModelShape,
    resident: tuple[Part, ...],
    reference: tuple[Part, ...],
    activations: tuple[Part, ...],
    *,
    num_shards: int,
    expert_parallel: int,
) -> tuple[Moment, ...]:
    """Return moments of a step on several ranks: text layers are gathered one by one, all else for the whole pass.

    What is gathered arrives in a buffer, from which it is copied. In the backward pass the buffer is then released. In
    the forward pass it stays until the next one has been copied, so there are two buffers beside a layer; beside the
    first layer these are its own and that of all else. Of a layer's experts a rank gathers only those that it owns.
    Gradients are made in the precision of the weights.
    """
    others, experts = shape.num_parameters - shape.num_of_text_layers, shape.num_of_layers_experts
    layer = shape.num_of_largest_layer - experts + experts // expert_parallel
    of_others, of_layer = _BFLOAT16 * others, _BFLOAT16 * layer
    trained, trained_of_layer, made = others, layer, _BFLOAT16
    if shape.adapters is not None:
        trained_of_layer, made = shape.adapters.num_of_largest_layer, _FLOAT32
        trained = shape.adapters.num_parameters - shape.adapters.num_of_text_layers
        of_others, of_layer = of_others + _FLOAT32 * trained, of_layer + _FLOAT32 * trained_of_layer
    gathered = Part(name="gathered embedding, tower and head", size_bytes=of_others)
    forward = max(
        (Part(name="a gathered layer and the buffers of two", size_bytes=3 * of_layer),),
        (
            Part(name="the buffer of the same", size_bytes=of_others),
            Part(name="the first layer and its buffer", size_bytes=2 * of_layer),
        ),
        key=lambda parts: sum(part.size_bytes for part in parts),
    )
    layers = Part(name="two gathered layers", size_bytes=2 * of_layer)
    layers_gradients = Part(
        name="a layer's gradients, made and summed", size_bytes=(made + _FLOAT32) * trained_of_layer
    )
    gradients = Part(name="gradients of embedding, tower and head", size_bytes=made * trained)
    summed = (
        Part(name="the same, to be summed", size_bytes=_FLOAT32 * trained),
        Part(name="a rank's share of the sum", size_bytes=_FLOAT32 * trained // num_shards),
    )
    moments = [
        Moment(name="as a layer is gathered", parts=(*resident, gathered, *forward)),
        Moment(
            name="back through the layers",
            parts=(*resident, gathered, layers, layers_gradients, gradients, *activations),
        ),
        Moment(name="at the end of the way back", parts=(*resident, gradients, *summed)),
    ]
    if reference:
        moments.append(Moment(name="while the reference computes", parts=(*resident, *reference, gathered, *forward)))
    return tuple(moments)


def _pushed(shape: ModelShape, recipe: Recipe) -> Iterator[Part]:
    """Yield the copies for pushes that may be on the trainer's GPU throughout a step."""
    size = 0 if recipe.trainer.keeps_copies_on_host else _copy_bytes(shape)
    where = ", on the host" if recipe.trainer.keeps_copies_on_host else ""
    yield Part(name=f"copy that was pushed{where}", size_bytes=size)
    if recipe.trainer.weight_sync.transport == "delta":
        yield Part(name=f"copy before it, for deltas{where}", size_bytes=size)
    if may_need_held_out_copy(recipe):
        yield Part(name=f"{HELD_OUT_COPY}{where}", size_bytes=size)


def _pushing(shape: ModelShape, recipe: Recipe) -> Iterator[Part]:
    """Yield a snapshot's additional parts: the whole copy, a bucket, or of several ranks a part of what each writes."""
    trainer = recipe.trainer
    name, largest = max(shape.sizes, key=lambda each: each[1])
    ranks = {"ranks": trainer.num_shards, "expert_parallel": trainer.expert_parallel}
    if not trainer.keeps_copies_on_host:
        yield Part(name="copy to be pushed", size_bytes=_copy_bytes(shape))
    if shape.adapters is not None:
        scaled = shape.share_bytes(shape.adapters.scaled, _FLOAT32, **ranks)
        yield Part(name="every B, multiplied by the scale", size_bytes=scaled)
    elif trainer.ranks == 1 and trainer.optimizer.offload:
        yield Part(name="largest weight, packed", size_bytes=_BFLOAT16 * largest)
    elif trainer.ranks > 1 and not trainer.optimizer.offload:
        share = shape.share_bytes({name}, _BFLOAT16, **ranks)
        yield Part(name="a part of the rows, rounded", size_bytes=min(share, MAX_BUCKET_BYTES))


def _copy_bytes(shape: ModelShape) -> int:
    """Return the bytes of a copy for pushes."""
    return _BFLOAT16 * shape.num_parameters if shape.adapters is None else _FLOAT32 * shape.adapters.num_parameters
