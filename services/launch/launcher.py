"""A whole run on this machine: its processes, their addresses, and what a person sees of it.

The processes are started all at once and find each other through addresses fixed beforehand, so each can die and come
back without the others being told.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import config as configuration
from penstock.bus.local_server import server_command
from penstock.runtime.ports import free_ports
from services.launch.child import ProcessSpec, StopStage
from services.launch.display import Display, open_display
from services.launch.metrics import MetricsFollower, describe_run
from services.launch.run_folder import RunFolder
from services.launch.supervisor import Supervisor, supervised
from services.recipe import Recipe

_BUS_START_TIMEOUT_S = 10.0
_REFRESH_S = 0.5
_LOCAL = "127.0.0.1"


async def launch(recipe: Recipe, folder: RunFolder, stop: asyncio.Event) -> None:
    """Run `recipe` in `folder` to its end, or until `stop` is set; no process is left afterwards.

    Raises:
        UserError: a process found something that a person must change.
        ProcessFailedError: a process died too often.
    """
    live = with_addresses(recipe, folder)
    folder.live_file.write_text(configuration.dump(live))
    specs = process_specs(live, folder, own_bus=not recipe.bus.url)
    metrics = MetricsFollower(folder.metrics_file)
    metrics.poll()
    display = open_display(f"{recipe.run.name}  {folder.path}")
    try:
        display.tell(f"run folder {folder.path}")
        async with supervised(specs, logs=folder.logs, config=recipe.launch, report=display.tell) as supervisor:
            watching = asyncio.create_task(_watch(supervisor, metrics, display))
            try:
                await _start(supervisor, specs, live, display, stop)
                await supervisor.wait(stop)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            new_rows = metrics.poll()
            display.show(supervisor.children, metrics.rows, new_rows)
            if stop.is_set():
                display.tell("stopping the processes; again to kill them at once")
    finally:
        display.close()
    _tell_result(recipe, folder, metrics, interrupted=stop.is_set())


def with_addresses(recipe: Recipe, folder: RunFolder) -> Recipe:
    """The recipe with what this launch settles: the run folder, the bus, a free port for each server without one."""
    tree = recipe.model_dump()
    tree["run"]["folder"] = folder.path
    ports = iter(free_ports(4))
    if not recipe.bus.url:
        tree["bus"]["url"] = f"nats://{_LOCAL}:{next(ports)}"
    for section in ("reward", "router", "trainer"):
        tree[section]["port"] = tree[section]["port"] or next(ports)
    return Recipe.model_validate(tree)


def process_specs(live: Recipe, folder: RunFolder, *, own_bus: bool) -> list[ProcessSpec]:
    """The processes of the run, in the order in which they are shown and started."""
    environment = child_environment(has_gpu=Path("/proc/driver/nvidia/version").exists())
    specs: list[ProcessSpec] = []
    if own_bus:
        port = int(live.bus.url.rpartition(":")[2])
        command = server_command(folder.nats, host=_LOCAL, port=port)
        own = {**environment, **command.environment}
        specs.append(ProcessSpec(name="nats", command=command.arguments, environment=own, stage=StopStage.BUS))

    def add(service: str, name: str, stage: StopStage, *overrides: str, **options: Any) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "services.cli",
            "serve",
            service,
            "--config",
            str(folder.live_file),
            "--name",
            name,
            *overrides,
        ]
        specs.append(ProcessSpec(name=name, command=command, environment=environment, stage=stage, **options))

    # First, for they take longest to start.
    for index in range(live.rollout.replicas):
        add("rollout", f"rollout-{index}", StopStage.SERVE, "--rollout.role=unified")
    for index in range(live.rollout.prefill):
        add("rollout", f"prefill-{index}", StopStage.SERVE, "--rollout.role=prefill")
    for index in range(live.rollout.decode):
        add("rollout", f"decode-{index}", StopStage.SERVE, "--rollout.role=decode")
    add("trainer", "trainer", StopStage.WORK, ends_run=True)
    add("reward", "reward", StopStage.SERVE)
    add("router", "router", StopStage.SERVE)
    for index in range(live.worker.num):
        add("worker", f"worker-{index}", StopStage.WORK)
    return specs


def child_environment(*, has_gpu: bool) -> dict[str, str]:
    """The environment of the processes: this one's, and on a CPU one computing thread each, unless it is set already.

    Several processes whose OpenMP threads wait for each other on few cores come almost to a halt.
    """
    on_cpu = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    return {**({} if has_gpu else on_cpu), **os.environ}


async def _start(
    supervisor: Supervisor, specs: Sequence[ProcessSpec], live: Recipe, display: Display, stop: asyncio.Event
) -> None:
    """Start the bus and then, as soon as it listens, all others at once."""
    display.tell(f"starting {', '.join(spec.name for spec in specs)} ...")
    for spec in specs:
        supervisor.start(spec.name)
        if spec.stage is StopStage.BUS:
            await _wait_until_listening(int(live.bus.url.rpartition(":")[2]), stop)


async def _wait_until_listening(port: int, stop: asyncio.Event) -> None:
    """Return when it listens, or after a while; then the processes that need it say what is wrong."""
    deadline = asyncio.get_running_loop().time() + _BUS_START_TIMEOUT_S
    while not stop.is_set() and asyncio.get_running_loop().time() < deadline:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(_LOCAL, port), timeout=1.0)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


async def _watch(supervisor: Supervisor, metrics: MetricsFollower, display: Display) -> None:
    """Show how the run stands, twice a second."""
    while True:
        for child in supervisor.children:
            if child.look():
                display.tell(f"{child.spec.name} is up after {child.age_s:.1f} s")
        new_rows = metrics.poll()
        display.show(supervisor.children, metrics.rows, new_rows)
        await asyncio.sleep(_REFRESH_S)


def _tell_result(recipe: Recipe, folder: RunFolder, metrics: MetricsFollower, *, interrupted: bool) -> None:
    lines = [*describe_run(metrics.rows), f"folder  {folder.path}"]
    for label, path in (("curves", folder.path / "curves.png"), ("samples", folder.path / "samples")):
        if path.exists():
            lines.append(f"{label:<7} {path}")
    is_unfinished = any(row["step"] < row["num_steps"] for row in metrics.rows[-1:])
    if interrupted or is_unfinished:
        lines.append(f"stopped; `penstock train --resume {folder.path}` continues the run")
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.flush()
