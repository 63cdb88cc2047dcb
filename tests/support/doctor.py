"""Machines for the tests of `penstock doctor`, and what is expected of a finding."""

from typing import Any

from penstock.config import load
from services.doctor.finding import Finding, Status
from services.doctor.gpu import Gpu, GpuFacts
from services.doctor.memory import ModelSize
from services.launch.gpu_plan import GpuPlan
from services.launch.run_plan import make_plan
from services.recipe import Recipe

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
    """It has this status and these words, and a remedy unless it is OK."""
    assert finding is not None
    assert finding.status is status, finding
    assert bool(finding.remedy) == (status is not Status.OK)
    for word in words:
        assert word in f"{finding.seen}; {finding.remedy}"
