"""Compares memory and disk with the needs of the recipe's model.

Sizes are calculated: weights, gradients and AdamW's averages in the trainer, weights in engines, and the measured
memory of the processes without a model. Activations and KV caches come on top: a finding of "ok" leaves room for them
but does not count them.
"""

import dataclasses

from penstock.model.precision import resolve_dtype
from services.doctor.finding import Finding, fault, gib, ok, warning
from services.doctor.gpu import GpuFacts
from services.launch.gpu_plan import TRAINER, GpuPlan
from services.plan.host_memory import host_moments
from services.recipe import Recipe

_FLOAT32 = 4
_AVERAGES = 8
"""Bytes of AdamW's two averages of a trained parameter, in float32."""
SPARE = 0.8
"""Above this share of the available memory, activations and caches may not fit."""
MIN_SHM_BYTES = 2**30
MIN_TEMPORARY_BYTES = 2**30

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The size of a model."""

    num_parameters: int
    checkpoint_bytes: int
    """Bytes of its weight files."""
    num_trained: int
    """Parameters with a learning rate; those of adapters are too few to count."""
    num_adapted: int = 0
    """Parameters of the matrices that adapters change."""


def check_gpu_memory(
    size: ModelSize, recipe: Recipe, plan: GpuPlan, facts: GpuFacts, *, is_sft: bool = False
) -> list[Finding]:
    """Check each kind of process against the memory of its GPU.

    Args:
        size: Size of the model.
        recipe: The recipe.
        plan: The GPUs of each process.
        facts: The GPUs, in the order of the plan's devices.
        is_sft: Whether `penstock sft` will run, which pushes no weights.
    """
    found = []
    memory = {device: gpu.total_bytes for device, gpu in zip(plan.devices, facts.gpus, strict=False)}
    free = {device: gpu.free_bytes for device, gpu in zip(plan.devices, facts.gpus, strict=False)}
    fraction = recipe.rollout.gpu_memory_fraction
    engines = [name for name in plan.of_process if name != TRAINER]
    for name in engines[:1]:
        device = plan.of_process[name][0]
        found.append(_engine(size, recipe, share=fraction * memory[device], free=free[device]))
    if TRAINER in plan.of_process:
        device = plan.of_process[TRAINER][0]
        taken = len(engines) * fraction if plan.is_shared else 0.0
        found.append(_trainer(size, recipe, room=(1 - taken) * memory[device], is_shared=bool(taken), is_sft=is_sft))
    return found


def _engine(size: ModelSize, recipe: Recipe, *, share: float, free: float) -> Finding:
    rollout = recipe.rollout
    per_weight = _DTYPE_BYTES.get(rollout.dtype)
    rounded = _DTYPE_BYTES["bfloat16"] * size.num_parameters  # also from a checkpoint in float32
    weights = min(size.checkpoint_bytes, rounded) if per_weight is None else per_weight * size.num_parameters
    weights //= rollout.tensor_parallel
    seen = f"weights take {gib(weights)} of the {gib(share)} that an engine may use"
    remedy = (
        "raise rollout.gpu_memory_fraction or rollout.tensor_parallel, or choose a smaller model; `penstock plan` "
        "tries settings"
    )
    if weights >= share:
        return fault("engine's GPU", seen, remedy)
    if share > free:
        return warning(
            "engine's GPU",
            f"an engine wants {gib(share)}, and {gib(free)} are free now",
            "end what else uses the GPU (`nvidia-smi` lists it), or lower rollout.gpu_memory_fraction",
        )
    if weights > SPARE * share:
        return warning("engine's GPU", f"{seen}; {gib(share - weights)} are left for KV caches", remedy)
    return ok("engine's GPU", seen)


def _trainer(size: ModelSize, recipe: Recipe, *, room: float, is_shared: bool, is_sft: bool) -> Finding:
    offloads, ranks = recipe.trainer.optimizer.offload, recipe.trainer.ranks
    if offloads and ranks > 1:
        return ok("trainer's GPU", f"weights of {ranks} ranks are in the host's memory, but for those of a few layers")
    copied = _DTYPE_BYTES[resolve_dtype(recipe.trainer.dtype, on_gpu=True)]
    has_adapters = recipe.trainer.lora.rank > 0
    has_copy = not recipe.trainer.keeps_copies_on_host and not is_sft
    num_shards = recipe.trainer.num_shards
    # Beside the weights that AdamW updates.
    has_rounded = ranks == 1 and copied < 4
    if has_adapters:
        per_weight = copied / num_shards  # the base is kept rounded
    else:
        per_weight = copied if offloads else _FLOAT32 / num_shards + (has_rounded + has_copy) * copied
    per_trained = 0 if offloads else (_FLOAT32 + _AVERAGES) / num_shards  # its gradient and averages
    if recipe.algorithm.needs_reference and not is_sft and not has_adapters:
        per_weight += copied if ranks == 1 else _FLOAT32 / num_shards
    needed = int(per_weight * size.num_parameters + per_trained * size.num_trained)
    parts = ["weights"] if offloads or has_adapters else ["weights", "gradients", "AdamW's averages"]
    parts += ["the copy that is pushed"] * (has_copy and len(parts) > 1)
    of = "" if ranks == 1 else f", in {ranks} ranks,"
    seen = f"{', '.join(parts)}{of} take {gib(needed)} of {gib(room)}"
    offload = "" if offloads else "set trainer.optimizer.offload = true, "
    remedy = f"{offload}raise trainer.ranks, or choose a smaller model; `penstock plan` tries settings"
    if is_shared:
        remedy = f"lower rollout.gpu_memory_fraction, since engines share this GPU; or {remedy}"
    if needed >= room:
        return fault("trainer's GPU", seen, remedy)
    if needed > SPARE * room:
        return warning("trainer's GPU", f"{seen}; {gib(room - needed)} are left for activations", remedy)
    return ok("trainer's GPU", seen)


def check_host_memory(
    size: ModelSize, recipe: Recipe, plan: GpuPlan, available: int, *, is_sft: bool = False
) -> Finding:
    """Check this machine's memory against the needs of all processes of a run.

    Args:
        size: Size of the model.
        recipe: The recipe.
        plan: The GPUs of each process.
        available: Bytes that processes may still take.
        is_sft: Whether `penstock sft` will run, which starts no engines.
    """
    rollout = recipe.rollout
    num_engines = 0 if is_sft else rollout.replicas + rollout.prefill + rollout.decode
    moments = host_moments(
        size.num_parameters,
        recipe,
        num_trained=size.num_trained,
        num_adapted=size.num_adapted,
        num_engines=num_engines,
        engines_on_gpu=bool(plan.devices),
        trainer_on_gpu=TRAINER in plan.of_process,
        is_sft=is_sft,
    )
    needed = max(moment.total_bytes for moment in moments)
    engines = f"{num_engines} {'engine' if num_engines == 1 else 'engines'}, trainer and services take"
    seen = f"{'training takes' if is_sft else engines} about {gib(needed)} of the {gib(available)} that are free"
    remedy = f"{'' if is_sft else 'lower rollout.replicas, '}choose a smaller model, or end other programs"
    if needed >= available:
        return fault("memory", seen, remedy)
    if needed > SPARE * available:
        return warning("memory", seen, remedy)
    return ok("memory", seen)


def check_shared_memory(free: int | None) -> Finding:
    """Check /dev/shm, through which NCCL and SGLang pass tensors; a container has 64 MiB of it by default.

    Args:
        free: Free bytes; None if there is no /dev/shm, or it is not writable.
    """
    remedy = "start the container with --shm-size=16g, or 1g without a GPU"
    if free is None:
        seen = "/dev/shm is missing or cannot be written to; engines keep their queues there, and do not start"
        return fault("shared memory", seen, "mount a tmpfs there, of mode 1777")
    if free < MIN_SHM_BYTES:
        return warning(
            "shared memory", f"/dev/shm has {gib(free)} free; NCCL and SGLang pass tensors through it", remedy
        )
    return ok("shared memory", f"/dev/shm has {gib(free)} free")


def check_disk(
    size: ModelSize | None, recipe: Recipe | None, folder: str, free: int | None, *, is_sft: bool = False
) -> Finding:
    """Check the file system of the runs against the checkpoints that a run keeps.

    Args:
        size: Size of the model; None if it is not known.
        recipe: The recipe; None if none was given.
        folder: The folder of runs, or the nearest folder above it that exists.
        free: Free bytes; None if the folder is not writable.
        is_sft: Whether `penstock sft` will run, which has no reference policy.
    """
    if free is None:
        return fault("disk", f"{folder} cannot be written to", "set run.dir to a folder of yours, or change its owner")
    seen = f"{folder} has {gib(free)} free"
    if size is None or recipe is None:
        return ok("disk", seen)
    num_kept = recipe.trainer.keep_checkpoints
    # A new checkpoint is written before the oldest is deleted.
    num_policies = 2 if recipe.algorithm.needs_reference and not is_sft else 1
    weights = 0 if recipe.trainer.lora.rank else num_policies * _FLOAT32 * size.num_parameters
    needed = (num_kept + 1) * (weights + _AVERAGES * size.num_trained)
    seen += f"; {num_kept} checkpoints, and one more while it is written, take {gib(needed)}"
    if needed >= free:
        return fault("disk", seen, "free some of it, set run.dir elsewhere, or lower trainer.keep_checkpoints")
    return ok("disk", seen)


def check_temporary(folder: str, free: int | None) -> Finding:
    """Check the folder of temporary files, in which engines keep sockets and fetched files.

    Args:
        folder: TMPDIR, or the system's.
        free: Free bytes; None if the folder is not writable.
    """
    if free is None:
        return fault("temporary files", f"{folder} cannot be written to", "set TMPDIR to a folder of yours")
    if free < MIN_TEMPORARY_BYTES:
        return warning("temporary files", f"{folder} has {gib(free)} free", "free some of it, or set TMPDIR elsewhere")
    return ok("temporary files", f"{folder} has {gib(free)} free")
