"""What engines and trainer take of GPUs, as `penstock doctor` counts it."""

import dataclasses

from services.doctor import memory
from services.doctor.finding import Status
from services.doctor.gpu import Gpu
from services.doctor.memory import ModelSize
from services.launch.gpu_plan import GpuPlan
from tests.support.doctor import GIB, H100, TWO_BILLION, assert_found, facts, plan, recipe


def test_memory_of_gpus_of_their_own() -> None:
    """Two billion parameters: 4 GB of bfloat16 in an engine; 16 + 2 + 2 bytes each, 40 GB, in the trainer."""
    one_each = recipe()
    engine, trainer = memory.check_gpu_memory(TWO_BILLION, one_each, plan(one_each, 2), facts(H100, H100))
    assert_found(engine, Status.OK, "weights take 3.7 GiB of the 68.0 GiB")
    assert_found(trainer, Status.OK, "37.3 GiB of 80.0 GiB")
    small = Gpu(name="small", capability=(8, 9), free_bytes=24 * GIB, total_bytes=24 * GIB)
    _, trainer = memory.check_gpu_memory(TWO_BILLION, one_each, plan(one_each, 2), facts(small, small))
    assert_found(trainer, Status.FAULT, "37.3 GiB of 24.0 GiB", "trainer.optimizer.offload = true")
    offloading = recipe("--trainer.optimizer.offload=true")
    _, trainer = memory.check_gpu_memory(TWO_BILLION, offloading, plan(offloading, 2), facts(small, small))
    assert_found(trainer, Status.OK, "weights take 3.7 GiB of 24.0 GiB")


def test_memory_of_a_gpu_that_is_shared() -> None:
    """The trainer has what the engines leave."""
    shared = recipe("--rollout.gpu_memory_fraction=0.6")
    _, trainer = memory.check_gpu_memory(TWO_BILLION, shared, plan(shared, 1), facts(H100))
    assert_found(trainer, Status.FAULT, "37.3 GiB of 32.0 GiB", "lower rollout.gpu_memory_fraction")
    less = recipe("--rollout.gpu_memory_fraction=0.4")
    _, trainer = memory.check_gpu_memory(TWO_BILLION, less, plan(less, 1), facts(H100))
    assert_found(trainer, Status.OK, "37.3 GiB of 48.0 GiB")
    tight = recipe("--rollout.gpu_memory_fraction=0.5")
    _, trainer = memory.check_gpu_memory(TWO_BILLION, tight, plan(tight, 1), facts(H100))
    assert_found(trainer, Status.WARNING, "2.7 GiB are left for activations")


def test_memory_that_an_engine_does_not_have() -> None:
    """Weights that do not fit its share, that leave little for KV caches, and a GPU that something else uses."""
    huge = ModelSize(num_parameters=40_000_000_000, num_trained=40_000_000_000, checkpoint_bytes=80_000_000_000)
    one_each, split = recipe(), recipe("--rollout.tensor_parallel=2")
    engine, _ = memory.check_gpu_memory(huge, one_each, plan(one_each, 2), facts(H100, H100))
    assert_found(engine, Status.FAULT, "74.5 GiB of the 68.0 GiB", "rollout.gpu_memory_fraction")
    engine, _ = memory.check_gpu_memory(huge, split, plan(split, 3), facts(H100, H100, H100))
    assert_found(engine, Status.OK, "37.3 GiB of the 68.0 GiB")
    large = ModelSize(num_parameters=32_000_000_000, num_trained=32_000_000_000, checkpoint_bytes=64_000_000_000)
    engine, _ = memory.check_gpu_memory(large, one_each, plan(one_each, 2), facts(H100, H100))
    assert_found(engine, Status.WARNING, "8.4 GiB are left for KV caches")
    used = Gpu(name="used", capability=(9, 0), free_bytes=10 * GIB, total_bytes=80 * GIB)
    engine, _ = memory.check_gpu_memory(TWO_BILLION, one_each, plan(one_each, 2), facts(used, H100))
    assert_found(engine, Status.WARNING, "10.0 GiB are free now", "nvidia-smi")


def test_an_engine_rounds_a_checkpoint_in_float32() -> None:
    """To bfloat16, which the trainer computes in."""
    one_each, wide = (
        recipe(),
        ModelSize(num_parameters=2_000_000_000, num_trained=2_000_000_000, checkpoint_bytes=8_000_000_000),
    )
    engine, _ = memory.check_gpu_memory(wide, one_each, plan(one_each, 2), facts(H100, H100))
    assert_found(engine, Status.OK, "weights take 3.7 GiB of the 68.0 GiB")


def test_memory_of_ranks() -> None:
    """On its GPU each has a share of the 16 bytes; the host has copies for pushes and the checkpoint being written."""
    ranks = recipe("--trainer.ranks=4")
    small = Gpu(name="small", capability=(8, 9), free_bytes=8 * GIB, total_bytes=8 * GIB)
    _, trainer = memory.check_gpu_memory(TWO_BILLION, ranks, plan(ranks, 5), facts(*[small] * 5))
    assert_found(trainer, Status.WARNING, "averages, in 4 ranks,", "7.5 GiB of 8.0 GiB", "raise trainer.ranks")

    # 4 bytes of copies for pushes and 12 of a checkpoint for each parameter; 6 and 12 with deltas
    found = memory.check_host_memory(TWO_BILLION, ranks, plan(ranks, 5), available=40 * GIB)
    assert_found(found, Status.WARNING, "take about 34.9 GiB of the 40.0 GiB")
    assert_found(memory.check_host_memory(TWO_BILLION, ranks, plan(ranks, 5), 34 * GIB), Status.FAULT)
    more = recipe("--trainer.ranks=2", "--trainer.weight_sync.transport=delta")
    found = memory.check_host_memory(TWO_BILLION, more, plan(more, 3), available=2**60)
    assert_found(found, Status.OK, "take about 36.8 GiB of")


def test_what_is_not_trained_has_neither_gradients_nor_averages() -> None:
    """On the GPU, in the host's memory and in checkpoints, which of adapters hold nothing else."""
    frozen = dataclasses.replace(TWO_BILLION, num_trained=0)
    alone, shared = recipe(), recipe("--rollout.gpu_memory_fraction=0.6")
    _, trainer = memory.check_gpu_memory(frozen, shared, plan(shared, 1), facts(H100))
    assert_found(trainer, Status.OK, "14.9 GiB of 32.0 GiB")
    found = memory.check_host_memory(frozen, alone, plan(alone, 0), available=60 * GIB)
    whole = memory.check_host_memory(TWO_BILLION, alone, plan(alone, 0), available=2**60)
    assert found.seen != whole.seen
    adapters = recipe("--trainer.lora.rank=8")
    assert_found(memory.check_disk(frozen, adapters, "/runs", free=GIB), Status.OK, "take 0.0 GiB")
    assert_found(memory.check_disk(TWO_BILLION, alone, "/runs", free=GIB), Status.FAULT)


def test_memory_of_adapters() -> None:
    """The trainer rounds the model, which its ranks divide, and has no copy of it for pushes; each engine keeps the
    matrices that adapters change in the host's memory beside its weights."""
    adapters = recipe("--trainer.lora.rank=16", "--rollout.replicas=3")
    size = ModelSize(
        num_parameters=14_800_000_000, num_trained=0, num_adapted=13_200_000_000, checkpoint_bytes=29_600_000_000
    )
    _, trainer = memory.check_gpu_memory(size, adapters, plan(adapters, 4), facts(*[H100] * 4))
    assert_found(trainer, Status.OK, "weights take 27.6 GiB of 80.0 GiB")  # 2 bytes of each
    divided = recipe("--trainer.lora.rank=16", "--trainer.ranks=2", "--rollout.replicas=2")
    _, trainer = memory.check_gpu_memory(size, divided, plan(divided, 4), facts(*[H100] * 4))
    assert_found(trainer, Status.OK, "weights, in 2 ranks, take 13.8 GiB of 80.0 GiB")
    kept = 3 * 2 * size.num_adapted + 4 * size.num_parameters  # the trainer starts on the host
    for available, status in ((1.9 * kept, "ok"), (1.1 * kept, "warning"), (kept, "fault")):
        assert_found(memory.check_host_memory(size, adapters, plan(adapters, 4), int(available)), Status(status))


def test_memory_of_supervised_training() -> None:
    """16 bytes for each parameter and 2 for copies in bfloat16; no reference policy, whatever the algorithm says."""
    with_reference = recipe("--algorithm.kl.kind=k3")
    alone = GpuPlan(devices=("0",), of_process={"trainer": ("0",)}, is_shared=False)
    (found,) = memory.check_gpu_memory(TWO_BILLION, with_reference, alone, facts(H100), is_sft=True)
    assert_found(found, Status.OK, "33.5 GiB of 80.0 GiB")
    exact = recipe("--trainer.dtype=float32")
    (found,) = memory.check_gpu_memory(TWO_BILLION, exact, alone, facts(H100), is_sft=True)
    assert_found(found, Status.OK, "29.8 GiB of 80.0 GiB")
    small = Gpu(name="small", capability=(8, 9), free_bytes=24 * GIB, total_bytes=24 * GIB)
    (found,) = memory.check_gpu_memory(TWO_BILLION, exact, alone, facts(small), is_sft=True)
    assert_found(found, Status.FAULT, "trainer.optimizer.offload = true")
    on_cpu = GpuPlan(devices=(), of_process={}, is_shared=False)
    found = memory.check_host_memory(TWO_BILLION, recipe("--rollout.replicas=8"), on_cpu, 36 * GIB, is_sft=True)
    assert_found(found, Status.WARNING, "training takes about 31.0 GiB of the 36.0 GiB")
