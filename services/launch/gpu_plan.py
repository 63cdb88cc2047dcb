"""Assigns GPUs to the processes of a run.

Invariant: with two or more GPUs, no two processes share one. A single GPU is shared by all.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.errors import ConfigError

_PROC = Path("/proc/driver/nvidia/gpus")
_DEV = Path("/dev")

TRAINER = "trainer"
"""Name of the trainer in a plan."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The GPUs of each process by its name; a process without any computes on the CPU."""

    devices: Sequence[str]
    """All GPUs that the run may use, by their names in CUDA_VISIBLE_DEVICES."""
    of_process: Mapping[str, Sequence[str]]
    is_shared: bool
    """Whether all processes share the only GPU."""

    def environment(self, name: str) -> dict[str, str]:
        """Return the variable that shows the process its GPUs and hides the others; empty if there is no GPU at all."""
        if not self.devices:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.of_process.get(name, ()))}


def find_gpus(environment: Mapping[str, str] = os.environ, *, proc: Path = _PROC, dev: Path = _DEV) -> list[str]:
    """Return the names of the usable GPUs, as in CUDA_VISIBLE_DEVICES; loads neither torch nor the driver.

    Args:
        environment: Its CUDA_VISIBLE_DEVICES, if set, is the answer.
        proc: Folder in which the driver lists its GPUs.
        dev: Folder of device files, for containers that do not show `proc`.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA ignores all names after the first invalid one; -1 and the empty name are the usual invalid ones.
        invalid = [index for index, name in enumerate(names) if name in ("", "-1", "NoDevFiles")]
        return names[: invalid[0]] if invalid else names
    count = len(list(proc.iterdir())) if proc.is_dir() else 0
    count = count or sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in dev.glob("nvidia*"))
    return [str(index) for index in range(count)]


def plan_gpus(
    devices: Sequence[str],
    engines: Sequence[str],
    *,
    tensor_parallel: int,
    trainer_ranks: int,
    memory_fraction: float,
) -> GpuPlan:
    """Give each engine `tensor_parallel` GPUs and each trainer rank one, without sharing; a single GPU is shared.

    Args:
        devices: The GPUs, as `find_gpus` returns them.
        engines: The engines' names.
        tensor_parallel: GPUs of one engine.
        trainer_ranks: Ranks of the trainer; 0 if it computes on the CPU.
        memory_fraction: Share of a GPU's memory that one engine takes.

    Raises:
        ConfigError: there are too few GPUs, or the engines want the whole memory of the GPU that they share.
    """
    if not devices:
        if engines and tensor_parallel > 1:
            raise ConfigError(
                f"rollout.tensor_parallel = {tensor_parallel}: no GPU can be used, and the engines that "
                "`penstock train` starts on a CPU are one process each; set it to 1"
            )
        return GpuPlan(devices=(), of_process={}, is_shared=False)
    if len(devices) == 1 and tensor_parallel == 1 and trainer_ranks <= 1:
        if len(engines) * memory_fraction >= 1:
            raise ConfigError(
                f"rollout.gpu_memory_fraction = {memory_fraction:g}: {len(engines)} engines with that share do not fit "
                f"the one GPU; set it below {1 / len(engines):.2f}, or lower rollout.replicas"
            )
        shared = {name: tuple(devices) for name in (*engines, *[TRAINER] * trainer_ranks)}
        return GpuPlan(devices=tuple(devices), of_process=shared, is_shared=len(shared) > 1)
    wanted = _Wanted(trainer_ranks=trainer_ranks, engines=len(engines), tensor_parallel=tensor_parallel)
    if wanted.num_gpus > len(devices):
        raise ConfigError(wanted.explain_shortage(len(devices), memory_fraction))
    free = iter(devices)
    of_process = {name: tuple(next(free) for _ in range(tensor_parallel)) for name in engines}
    if trainer_ranks:
        of_process[TRAINER] = tuple(next(free) for _ in range(trainer_ranks))
    return GpuPlan(devices=tuple(devices), of_process=of_process, is_shared=False)


def extend_plan(plan: GpuPlan, engines: Sequence[str], *, tensor_parallel: int) -> GpuPlan:
    """Give further engines `tensor_parallel` GPUs each that no process has.

    Raises:
        ConfigError: too few are free.
    """
    if not plan.devices or not engines:
        return plan
    require_own_gpus(plan)
    used = {device for devices in plan.of_process.values() for device in devices}
    free = [device for device in plan.devices if device not in used]
    num_needed = len(engines) * tensor_parallel
    if num_needed > len(free):
        raise ConfigError(
            f"{len(engines)} more {'engine' if len(engines) == 1 else 'engines'} with rollout.tensor_parallel = "
            f"{tensor_parallel} need {num_needed} GPUs, and {len(free)} of {len(plan.devices)} are free; add at most "
            f"{len(free) // tensor_parallel}"
        )
    left = iter(free)
    added = {name: tuple(next(left) for _ in range(tensor_parallel)) for name in engines}
    return dataclasses.replace(plan, of_process={**plan.of_process, **added})


def require_own_gpus(plan: GpuPlan) -> None:
    """Check that engines may join or leave.

    Raises:
        ConfigError: all share one GPU.
    """
    if plan.is_shared:
        raise ConfigError(
            f"GPU {plan.devices[0]} is the only one, and its memory was divided at the start; to change the number of "
            "engines, end the run and continue it with --resume, rollout.replicas and rollout.gpu_memory_fraction"
        )


def without(plan: GpuPlan, name: str) -> GpuPlan:
    """Return the plan after the end of a process."""
    return dataclasses.replace(plan, of_process={key: value for key, value in plan.of_process.items() if key != name})


_SETTINGS: Final = {
    "trainer_ranks": "trainer.ranks to {number}",
    "engines": "the number of engines to {number} (rollout.replicas, prefill, decode)",
    "tensor_parallel": "rollout.tensor_parallel to {number}",
}
_LOWERED: Final = (
    ("engines",),
    ("trainer_ranks",),
    ("tensor_parallel",),
    ("trainer_ranks", "engines"),
    ("engines", "tensor_parallel"),
    ("trainer_ranks", "tensor_parallel"),
    ("trainer_ranks", "engines", "tensor_parallel"),
)
"""Settings to lower together, in the order in which they are tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a run wants of its GPUs; the fields are what can be lowered."""

    trainer_ranks: int
    engines: int
    tensor_parallel: int

    @property
    def num_gpus(self) -> int:
        return self.engines * self.tensor_parallel + self.trainer_ranks

    def fits(self, num_devices: int, memory_fraction: float) -> bool:
        if num_devices == 1 and self.tensor_parallel == 1 and self.trainer_ranks <= 1:
            return self.engines * memory_fraction < 1
        return self.num_gpus <= num_devices

    def explain_shortage(self, num_devices: int, memory_fraction: float) -> str:
        """Say what is wanted, and what to lower so that it fits."""
        needed = (
            f"{self.engines} {'engine' if self.engines == 1 else 'engines'} with rollout.tensor_parallel = "
            f"{self.tensor_parallel}"
        )
        needed += {0: "", 1: " and the trainer"}.get(
            self.trainer_ranks, f" and a trainer of {self.trainer_ranks} ranks"
        )
        if not self.engines:
            needed = f"the {self.trainer_ranks} ranks of the trainer"
        return (
            f"{needed} need {self.num_gpus} GPUs, and {num_devices} can be used; lower "
            f"{self._remedy(num_devices, memory_fraction)}, or show the run more GPUs with CUDA_VISIBLE_DEVICES"
        )

    def _remedy(self, num_devices: int, memory_fraction: float) -> str:
        """Return as few settings as possible, of which all but the last become 1, and the last is lowered the least."""
        for *to_one, last in _LOWERED:
            lowered = dataclasses.replace(self, **dict.fromkeys(to_one, 1))
            if any(getattr(self, name) <= 1 for name in to_one):
                continue
            for number in range(getattr(self, last) - 1, 0, -1):
                if dataclasses.replace(lowered, **{last: number}).fits(num_devices, memory_fraction):
                    parts = [_SETTINGS[name].format(number=1) for name in to_one]
                    most = number if last == "engines" else f"at most {number}"
                    return " and ".join(filter(None, [", ".join(parts), _SETTINGS[last].format(number=most)]))
        raise AssertionError("one GPU has room for one engine and the trainer")
