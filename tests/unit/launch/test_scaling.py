"""How many processes a run shall have, and which GPUs further ones get."""

import pytest

from penstock.errors import ConfigError
from services.launch.gpu_plan import GpuPlan, extend_plan, plan_gpus, without
from services.launch.scaling.fleet import parse_counts


def test_counts_are_read_by_kind() -> None:
    """Mistakes are named."""
    assert parse_counts(["rollout=6", "worker=2"]) == {"rollout": 6, "worker": 2}
    for wrong, words in (
        (["engine=2"], "'engine' cannot be scaled; write KIND=N with one of rollout, prefill, decode, worker"),
        (["rollout"], "'rollout' has no number of processes; write rollout=N"),
        (["rollout=-1"], "'rollout=-1' has no number"),
        ([], "nothing is to be scaled"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_counts(wrong)


def planned(num_devices: int, engines: list[str]) -> GpuPlan:
    """The plan of these engines and a trainer of one rank."""
    devices = [str(index) for index in range(num_devices)]
    return plan_gpus(devices, engines, tensor_parallel=1, trainer_ranks=1, memory_fraction=0.5)


def test_further_engines_get_gpus_that_nobody_has() -> None:
    """Those that were there keep theirs; what an engine leaves is free again."""
    plan = extend_plan(planned(4, ["rollout-0"]), ["rollout-1"], tensor_parallel=1)
    assert plan.of_process == {"rollout-0": ("0",), "trainer": ("1",), "rollout-1": ("2",)}
    plan = extend_plan(without(plan, "rollout-0"), ["rollout-2", "rollout-3"], tensor_parallel=1)
    assert plan.of_process == {"trainer": ("1",), "rollout-1": ("2",), "rollout-2": ("0",), "rollout-3": ("3",)}


def test_engines_for_which_there_is_no_gpu_are_refused() -> None:
    """With the number that fits; a GPU that all share was divided at the start, and CPUs have room for any."""
    with pytest.raises(ConfigError, match=r"3 more engines .* need 3 GPUs, and 2 of 4 are free; add at most 2"):
        extend_plan(planned(4, ["rollout-0"]), ["a", "b", "c"], tensor_parallel=1)
    with pytest.raises(ConfigError, match="GPU 0 is the only one, and its memory was divided at the start"):
        extend_plan(planned(1, ["rollout-0"]), ["rollout-1"], tensor_parallel=1)
    on_cpu = planned(0, ["rollout-0"])
    assert extend_plan(on_cpu, ["rollout-1"], tensor_parallel=1) == on_cpu
