"""Plans what `penstock train` starts: processes, addresses, GPUs and order. Pure: nothing is opened or written."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from penstock.errors import ConfigError
from services.launch.checks.precision import require_same_precision
from services.launch.gpu_plan import TRAINER, GpuPlan, plan_gpus
from services.launch.process.spec import StopPhase
from services.recipe import Recipe
from services.trainer.config import TrainerConfig

LOCAL = "127.0.0.1"
PORTS = (
    ("rollout", "port"),
    ("worker", "port"),
    ("reward", "port"),
    ("reward", "http_port"),
    ("router", "port"),
    ("router", "http_port"),
    ("trainer", "port"),
)
"""The settings of servers' ports."""
SERVING = frozenset(section for section, _ in PORTS)
"""The sections of processes that serve on a port."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of the run."""

    name: str
    service: str
    """The service's name in `penstock serve`."""
    phase: StopPhase
    address: str
    """host:port on which it serves; port 0 is any free one."""
    port_key: str = ""
    """The setting through which each start gets its own port."""
    overrides: Sequence[str] = ()
    """Settings in which it differs from other processes of its service."""
    ends_run: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All processes of a run, in the order of display and start."""

    processes: Sequence[PlannedProcess]
    gpus: GpuPlan

    def describe(self) -> list[str]:
        """Describe the plan in lines: a table of processes, and the use of the GPUs."""
        rows = [("process", "address", "GPUs"), *(self._row(process) for process in self.processes)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if not self.gpus.devices:
            lines.append("no GPU: everything is computed on the CPU")
        elif self.gpus.is_shared:
            lines.append(f"GPU {self.gpus.devices[0]} is shared by all that compute on a GPU")
        else:
            num_used = sum(len(devices) for devices in self.gpus.of_process.values())
            lines.append(f"{num_used} of {len(self.gpus.devices)} GPUs are used, each by one process")
        return lines

    def _row(self, process: PlannedProcess) -> tuple[str, str, str]:
        host, _, port = process.address.rpartition(":")
        address = process.address if port != "0" else f"{host}, any free port"
        return process.name, address, ", ".join(self.gpus.of_process.get(process.name, ())) or "-"


def plan_processes(recipe: Recipe, *, own_bus: bool, trains: bool = True) -> list[PlannedProcess]:
    """Return the processes of a run of `recipe`, wherever they run.

    Args:
        recipe: The recipe, its ports chosen or not.
        own_bus: Whether the run has its own nats-server.
        trains: Whether it has a trainer; without one, engines serve the recipe's model.

    Raises:
        ConfigError: several processes would have the same port.
    """
    _require_own_ports(recipe)
    _require_own_metrics_ports(recipe)
    return list(_processes(recipe, own_bus=own_bus, trains=trains))


def make_plan(recipe: Recipe, devices: Sequence[str], *, own_bus: bool, trains: bool = True) -> RunPlan:
    """Return the processes of a run of `recipe` on this machine.

    Args:
        recipe: The recipe, its ports chosen or not.
        devices: The machine's GPUs, as `find_gpus` returns them.
        own_bus: Whether the run has its own nats-server.
        trains: Whether it has a trainer; without one, engines serve the recipe's model.

    Raises:
        ConfigError: as `assign_gpus`, or several processes would have the same port.
    """
    processes = plan_processes(recipe, own_bus=own_bus, trains=trains)
    require_different_ports(recipe, {process.service for process in processes})
    return RunPlan(processes=processes, gpus=assign_gpus(recipe, processes, devices))


def assign_gpus(recipe: Recipe, processes: Sequence[PlannedProcess], devices: Sequence[str]) -> GpuPlan:
    """Return the GPUs of these processes of a run of `recipe`, if all of them are on one machine.

    Args:
        recipe: The recipe.
        processes: From `plan_processes`, or some of them.
        devices: The machine's GPUs, as `find_gpus` returns them.

    Raises:
        ConfigError: there are too few GPUs, or none and the trainer must compute on one, or engines would refuse the
            precision of the trainer's pushes.
    """
    services = {process.service for process in processes}
    trainer_gpus = _num_trainer_gpus(recipe.trainer, devices) if "trainer" in services else 0
    if services >= {"trainer", "rollout"}:  # engines that others start may be on hosts of another kind
        require_same_precision(recipe, has_gpus=len(devices) > 0)
    return plan_gpus(
        devices,
        [process.name for process in processes if process.service == "rollout"],
        tensor_parallel=recipe.rollout.tensor_parallel,
        trainer_ranks=trainer_gpus,
        memory_fraction=recipe.rollout.gpu_memory_fraction,
    )


def assign_sft_gpus(trainer: TrainerConfig, devices: Sequence[str]) -> GpuPlan:
    """Return the GPUs of `penstock sft`, which is the trainer alone.

    Args:
        trainer: The trainer's settings.
        devices: The machine's GPUs, as `find_gpus` returns them.

    Raises:
        ConfigError: there are too few GPUs, or none and the trainer must compute on one.
    """
    ranks = _num_trainer_gpus(trainer, devices)
    return plan_gpus(devices, engines=(), tensor_parallel=1, trainer_ranks=ranks, memory_fraction=0.0)


def _num_trainer_gpus(trainer: TrainerConfig, devices: Sequence[str]) -> int:
    """Return how many GPUs the trainer takes where there are any: one for each rank, or 0 if it computes on the CPU.

    Args:
        trainer: The trainer's settings.
        devices: The machine's GPUs, as `find_gpus` returns them.

    Raises:
        ConfigError: it must compute on a GPU, and there is none.
    """
    if trainer.device == "cuda" and not devices:
        raise ConfigError(
            "trainer.device = 'cuda', and no GPU can be used; set it to 'auto' or 'cpu', or show the run a GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    return trainer.ranks if trainer.device != "cpu" else 0


def _require_own_ports(recipe: Recipe) -> None:
    rollout, worker = recipe.rollout, recipe.worker
    num_engines = rollout.replicas + rollout.prefill + rollout.decode
    for key, port, count, kind in (
        ("rollout.port", rollout.port, num_engines, "engines"),
        ("worker.port", worker.port, worker.num, "workers"),
    ):
        if port and count > 1:
            raise ConfigError(
                f"{key} = {port} cannot be had by the {count} {kind} of one machine; set it to 0, and each takes a "
                "free one"
            )


def require_different_ports(recipe: Recipe, services: Collection[str]) -> None:
    """Check that servers on one host have different ports.

    Args:
        recipe: The recipe.
        services: The services on that host; those that serve on no port count for nothing.

    Raises:
        ConfigError: two of their settings are one port.
    """
    keys: dict[int, str] = {}
    for section, name in PORTS:
        port = getattr(getattr(recipe, section), name)
        key = f"{section}.{name}"
        if section in services and port and keys.setdefault(port, key) != key:
            raise ConfigError(
                f"{key} = {port} is {keys[port]} too, and only one server of a machine can have it; give another, or "
                "leave it out for a free one"
            )


def _require_own_metrics_ports(recipe: Recipe) -> None:
    if recipe.metrics.port:
        raise ConfigError(
            f"metrics.port = {recipe.metrics.port} cannot be had by all processes of this machine; set it to 0: each "
            "takes a free one and names it in the folder prometheus beside the run's"
        )


def _processes(recipe: Recipe, *, own_bus: bool, trains: bool) -> Iterator[PlannedProcess]:
    if own_bus:
        address = recipe.bus.url.rpartition("/")[2] or f"{LOCAL}:0"
        yield PlannedProcess(name="nats", service="nats", phase=StopPhase.BUS, address=address)
    # The engines come first because they take longest to start.
    counts = {"unified": recipe.rollout.replicas, "prefill": recipe.rollout.prefill, "decode": recipe.rollout.decode}
    for role, count in counts.items():
        for index in range(count):
            yield PlannedProcess(
                name=f"{'rollout' if role == 'unified' else role}-{index}",
                service="rollout",
                phase=StopPhase.SERVE,
                address=f"{recipe.network.local}:{recipe.rollout.port}",
                port_key="rollout.port",
                overrides=(f"--rollout.role={role}",),
            )
    if trains:
        yield PlannedProcess(
            name=TRAINER,
            service="trainer",
            phase=StopPhase.WORK,
            address=f"{recipe.network.local}:{recipe.trainer.port}",
            port_key="trainer.port",
            ends_run=True,
        )
    for service in ("reward", "router"):
        address = f"{recipe.network.local}:{getattr(recipe, service).port}"
        yield PlannedProcess(name=service, service=service, phase=StopPhase.SERVE, address=address)
    for index in range(recipe.worker.num):
        yield PlannedProcess(
            name=f"worker-{index}",
            service="worker",
            phase=StopPhase.WORK,
            address=f"{recipe.network.local}:{recipe.worker.port}",
            port_key="worker.port",
        )
