"""Each engine and the trainer compute on GPUs of their own; only a single GPU is shared."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config import load
from penstock.errors import ConfigError
from services.launch.gpu_plan import GpuPlan, find_gpus, plan_gpus
from services.launch.run_plan import make_plan
from services.recipe import Recipe

EIGHT = [str(index) for index in range(8)]


def plan(devices: list[str], num_engines: int, **options: Any) -> GpuPlan:
    """A plan for engines named e0, e1, ..."""
    options = {"tensor_parallel": 1, "trainer_ranks": 1, "memory_fraction": 0.4} | options
    return plan_gpus(devices, [f"e{index}" for index in range(num_engines)], **options)


def test_eight_gpus_give_every_process_its_own() -> None:
    """Seven engines and a trainer; three engines of two GPUs each and a trainer."""
    devices = plan(EIGHT, 7).of_process
    assert sorted(device for own in devices.values() for device in own) == EIGHT
    assert plan(EIGHT, 3, tensor_parallel=2).of_process == {
        "e0": ("0", "1"),
        "e1": ("2", "3"),
        "e2": ("4", "5"),
        "trainer": ("6",),
    }


def test_each_rank_of_the_trainer_has_a_gpu() -> None:
    """Behind those of the engines; what does not fit is refused with what would."""
    assert plan(EIGHT, 2, tensor_parallel=2, trainer_ranks=4).of_process == {
        "e0": ("0", "1"),
        "e1": ("2", "3"),
        "trainer": ("4", "5", "6", "7"),
    }
    with pytest.raises(
        ConfigError, match=r"^1 engine with .* and a trainer of 8 ranks need 9 GPUs, .*trainer\.ranks to at most 7"
    ):
        plan(EIGHT, 1, trainer_ranks=8)
    with pytest.raises(
        ConfigError, match=r"^the 2 ranks of the trainer need 2 GPUs, and 1 can be used; .*trainer\.ranks to at most 1"
    ):
        plan(["0"], 0, trainer_ranks=2)


def test_prefill_and_decode_engines_have_gpus_under_their_names() -> None:
    """Behind the unified ones and before the trainer's ranks; each process sees its own, and what lacks one is said."""
    sizes = ("--rollout.replicas=1", "--rollout.prefill=2", "--rollout.decode=1", "--rollout.tensor_parallel=2")
    recipe = load(Recipe, [], [*sizes, "--trainer.ranks=2"])
    devices = [str(number) for number in range(10)]
    plan = make_plan(recipe, devices, own_bus=True)
    assert plan.gpus.of_process == {
        "rollout-0": ("0", "1"),
        "prefill-0": ("2", "3"),
        "prefill-1": ("4", "5"),
        "decode-0": ("6", "7"),
        "trainer": ("8", "9"),
    }
    assert plan.gpus.environment("decode-0") == {"CUDA_VISIBLE_DEVICES": "6,7"}
    roles = {process.name: process.overrides for process in plan.processes if process.service == "rollout"}
    assert roles["prefill-1"] == ("--rollout.role=prefill",)
    assert roles.keys() == plan.gpus.of_process.keys() - {"trainer"}
    with pytest.raises(
        ConfigError, match=r"^4 engines with .* 2 ranks need 10 GPUs, and 9 can be used; lower the number"
    ):
        make_plan(recipe, devices[:9], own_bus=True)


@given(
    num_devices=st.integers(2, 16),
    num_engines=st.integers(0, 16),
    tensor_parallel=st.integers(1, 8),
    trainer=st.integers(0, 8),
)
def test_no_gpu_is_given_twice(num_devices: int, num_engines: int, tensor_parallel: int, trainer: int) -> None:
    """Whatever is asked for: either every process has as many as it needs, all different, or it is refused."""
    devices = [f"GPU-{index}" for index in range(num_devices)]
    needed = num_engines * tensor_parallel + trainer
    try:
        found = plan(devices, num_engines, tensor_parallel=tensor_parallel, trainer_ranks=trainer)
    except ConfigError:
        assert needed > num_devices
        return
    given_out = [device for own in found.of_process.values() for device in own]
    assert len(given_out) == len(set(given_out)) == needed <= num_devices
    assert set(given_out) <= set(devices)


@pytest.mark.parametrize(
    ("devices", "settings", "held", "pushed"),
    [
        ([], ("--rollout.dtype=bfloat16",), "bfloat16", "float32"),
        ([], ("--trainer.dtype=bfloat16",), "float32", "bfloat16"),
        (EIGHT, ("--trainer.dtype=float32",), "bfloat16", "float32"),
        (EIGHT, ("--trainer.device=cpu",), "bfloat16", "float32"),
        (EIGHT, ("--rollout.dtype=float16",), "float16", "bfloat16"),
        (EIGHT, ("--rollout.dtype=float32", "--trainer.dtype=bfloat16"), "float32", "bfloat16"),
    ],
)
def test_a_precision_that_engines_do_not_take_is_refused(
    devices: list[str], settings: tuple[str, ...], held: str, pushed: str
) -> None:
    """Before anything starts: every push would be refused. Engines alone may have any, and those of another host."""
    recipe = load(Recipe, [], settings)
    with pytest.raises(
        ConfigError,
        match=rf"^with rollout\.dtype = '\w+' engines hold {held}, and with trainer\.dtype = '\w+' the trainer pushes "
        f"{pushed}, which they refuse; set both to 'bfloat16' or both to 'float32'$",
    ):
        make_plan(recipe, devices, own_bus=True)
    make_plan(recipe, devices, own_bus=True, trains=False)
    make_plan(load(Recipe, [], (*settings, "--rollout.replicas=0")), devices, own_bus=True)


@pytest.mark.parametrize("devices", [[], EIGHT])
@pytest.mark.parametrize(
    "settings", [(), *[(f"--rollout.dtype={dtype}", f"--trainer.dtype={dtype}") for dtype in ("float32", "bfloat16")]]
)
def test_equal_precisions_and_the_defaults_are_taken(devices: list[str], settings: tuple[str, ...]) -> None:
    """On CPUs as on GPUs."""
    make_plan(load(Recipe, [], settings), devices, own_bus=True)


def test_a_single_gpu_is_shared() -> None:
    """By the trainer and all engines, if their shares of its memory leave room."""
    found = plan(["3"], 2)
    assert found.of_process == {"e0": ("3",), "e1": ("3",), "trainer": ("3",)}
    assert found.is_shared
    with pytest.raises(
        ConfigError, match=r"rollout\.gpu_memory_fraction = 0\.6: 2 engines with that share .*below 0\.50"
    ):
        plan(["3"], 2, memory_fraction=0.6)


def test_too_few_gpus_are_refused_with_numbers_and_remedy() -> None:
    """What is needed, what there is, and what would fit."""
    with pytest.raises(
        ConfigError, match=r"^8 engines with rollout\.tensor_parallel = 1 and the trainer need 9 GPUs, and 8 can "
    ):
        plan(EIGHT, 8)
    with pytest.raises(ConfigError, match=r"lower the number of engines to 3 \(rollout\.replicas"):
        plan(EIGHT, 4, tensor_parallel=2)
    with pytest.raises(
        ConfigError, match=r"need 3 GPUs, and 2 can be used; lower rollout\.tensor_parallel to at most 1"
    ):
        plan(["0", "1"], 1, tensor_parallel=2)


def test_settings_that_do_not_fit_one_by_one_are_lowered_together() -> None:
    """Ranks and engines, and what leaves each engine as many GPUs as there are."""
    with pytest.raises(ConfigError, match=r"; lower trainer\.ranks to 1 and the number of engines to 7 \(rollout\.rep"):
        plan(EIGHT, 8, trainer_ranks=8)
    with pytest.raises(
        ConfigError,
        match=r"; lower the number of engines to 1 \(.*\) and rollout\.tensor_parallel to at most 7, or show",
    ):
        plan(EIGHT, 16, tensor_parallel=8)
    with pytest.raises(
        ConfigError,
        match=r"lower trainer\.ranks to 1, the number of engines to 1 \(.*\) and rollout\.tensor_parallel to at most 1",
    ):
        plan(["0"], 2, tensor_parallel=8, trainer_ranks=2, memory_fraction=0.85)


@given(
    num_devices=st.integers(1, 16),
    num_engines=st.integers(0, 20),
    tensor_parallel=st.integers(1, 8),
    trainer=st.integers(0, 9),
    memory_fraction=st.sampled_from([0.3, 0.85]),
)
@example(num_devices=8, num_engines=8, tensor_parallel=1, trainer=8, memory_fraction=0.85)
@example(num_devices=1, num_engines=1, tensor_parallel=2, trainer=2, memory_fraction=0.85)
def test_a_plan_with_the_remedy_is_not_refused_again(
    num_devices: int, num_engines: int, tensor_parallel: int, trainer: int, memory_fraction: float
) -> None:
    """Whatever is asked for."""
    wanted = {"tensor_parallel": tensor_parallel, "trainer_ranks": trainer, "memory_fraction": memory_fraction}
    devices = [str(number) for number in range(num_devices)]
    try:
        plan(devices, num_engines, **wanted)
    except ConfigError as error:
        if "can be used" not in str(error):
            assert num_devices == 1, "its memory cannot be divided, which is another refusal"
            return
        lowered = dict(re.findall(r"(trainer\.ranks|engines|tensor_parallel) to (?:at most )?(\d+)", str(error)))
        wanted["trainer_ranks"] = int(lowered.pop("trainer.ranks", trainer))
        wanted["tensor_parallel"] = int(lowered.pop("tensor_parallel", tensor_parallel))
        plan(devices, int(lowered.pop("engines", num_engines)), **wanted)
        assert not lowered


def test_an_engine_on_a_cpu_is_one_process() -> None:
    """Refused before anything starts; a run without engines of its own may name what those elsewhere use."""
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel = 2: no GPU can be used, .*; set it to 1"):
        plan([], 1, tensor_parallel=2)
    assert plan([], 0, tensor_parallel=2).devices == ()


def test_a_trainer_that_must_have_a_gpu_is_refused_without_one() -> None:
    """Before anything starts, where `auto` would compute on the CPU; a run without a trainer may have the setting."""
    recipe = load(Recipe, [], ["--trainer.device=cuda"])
    with pytest.raises(
        ConfigError, match=r"^trainer\.device = 'cuda', and no GPU can be used; set it to 'auto' or 'cpu', or show "
    ):
        make_plan(recipe, [], own_bus=True)
    make_plan(recipe, [], own_bus=True, trains=False)
    assert make_plan(recipe, ["3"], own_bus=True).gpus.of_process["trainer"] == ("3",)


def test_every_process_sees_its_gpus_only() -> None:
    """Those without one see none, so that nothing lands on a GPU by accident; without GPUs nothing is set."""
    found = plan(["4", "5"], 1)
    assert found.environment("e0") == {"CUDA_VISIBLE_DEVICES": "4"}
    assert found.environment("trainer") == {"CUDA_VISIBLE_DEVICES": "5"}
    assert found.environment("router") == {"CUDA_VISIBLE_DEVICES": ""}
    assert plan([], 3).environment("e0") == {}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("2,0", ["2", "0"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("GPU-8a7b, GPU-9c", ["GPU-8a7b", "GPU-9c"])],
)
def test_cuda_visible_devices_decides(visible: str, devices: list[str], tmp_path: Path) -> None:
    """As CUDA reads it: indices or ids, up to the first that is invalid."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}, proc=tmp_path) == devices


def test_otherwise_the_driver_s_gpus_count(tmp_path: Path) -> None:
    """As /proc lists them, or the device files where /proc does not."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia1", "nvidia2"):
        (tmp_path / name).touch()
    assert find_gpus({}, proc=tmp_path / "none", dev=tmp_path) == ["0", "1", "2"]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/0000:01:00.0").mkdir()
    assert find_gpus({}, proc=tmp_path / "proc", dev=tmp_path) == ["0"]
    assert find_gpus({}, proc=tmp_path / "none", dev=tmp_path / "none") == []
