"""Runs a whole training run on a Ray cluster. Only addresses and the backend differ from a run on this machine."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from penstock.errors import ConfigError
from penstock.runtime.security import Security
from services.launch.background import background
from services.launch.launcher import addressed, run_processes
from services.launch.on_ray.addresses import listening, with_peers
from services.launch.on_ray.backend import RayBackend
from services.launch.on_ray.cluster import Cluster
from services.launch.on_ray.placement import (
    AT_THE_LAUNCHER,
    describe_hosts,
    describe_processes,
    describe_weight_files,
    require_room,
    require_room_to_join,
)
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.spec import ProcessSpec
from services.launch.process.specs import specs_of
from services.launch.run_bus import require_bus
from services.launch.run_folder import RunFolder
from services.launch.run_plan import PlannedProcess, plan_processes, require_different_ports
from services.launch.scaling.fleet import Fleet
from services.launch.terminal.lasting_output import lasting_output
from services.recipe import Recipe

_RESERVE_TIMEOUT_S: Final = 60.0
_LOOK_EVERY_S: Final = 10.0


async def examine(cluster: Cluster, recipe: Recipe) -> list[str]:
    """Examine the cluster's hosts, and return the plan of the run in lines.

    Raises:
        ConfigError: hosts are missing, have too few GPUs or CPUs, or cannot run the recipe; or services on this host
            have one port.
    """
    await cluster.look()
    processes = plan_processes(recipe, own_bus=not recipe.bus.url)
    require_different_ports(recipe, AT_THE_LAUNCHER)
    lines = [
        *describe_hosts(cluster.hosts),
        *describe_processes(processes, recipe, has_gpus=cluster.has_gpus),
        *describe_weight_files(cluster.hosts, recipe, has_gpus=cluster.has_gpus),
        *cluster.lines,
    ]
    try:
        require_room(cluster.hosts, processes, recipe, has_gpus=cluster.has_gpus)
    except ConfigError:
        sys.stdout.write("\n".join([*describe_hosts(cluster.hosts), ""]))
        raise
    return lines


async def launch(
    recipe: Recipe, folder: RunFolder, stop: asyncio.Event, *, security: Security, cluster: Cluster
) -> bool:
    """Run `recipe` in `folder` on the hosts of `cluster` to its end, or until `stop` is set; no process is left.

    The folder keeps the recipe once only a process can still refuse it. Returns whether the run is complete.

    Raises:
        UserError: the recipe's NATS does not answer, a nats-server serves the run's store, other jobs use the GPUs, or
            a process found a fault that a person must fix.
        ProcessFailedError: a process died too often.
    """
    folder.forget_targets()
    await require_bus(recipe, folder, security)
    own = cluster.own_address
    here = listening(recipe, own)
    with lasting_output(), addressed(here, folder, host=own, on_this_machine=AT_THE_LAUNCHER) as ported:
        live = with_peers(ported, own)
        folder.write_live(live)
        own_bus = not recipe.bus.url
        processes = plan_processes(live, own_bus=own_bus)
        has_gpus = cluster.has_gpus  # hosts that join or leave later do not change it

        def make_specs(wanted: Recipe, added: Sequence[PlannedProcess]) -> list[ProcessSpec]:
            wanted_processes = plan_processes(wanted, own_bus=own_bus)
            require_room_to_join(cluster.hosts, added, wanted_processes, wanted, has_gpus=has_gpus)
            return _specs(added, folder, security)

        backend = RayBackend(cluster, live, has_gpus=has_gpus, write=_write)
        order = require_room(cluster.hosts, processes, live, has_gpus=has_gpus)
        await backend.reserve(order, stop, timeout_s=_RESERVE_TIMEOUT_S)
        cluster.report = _write
        folder.write_config(recipe)
        async with background(cluster.keep_noticing(every_s=_LOOK_EVERY_S)):
            return await run_processes(
                _specs(processes, folder, security),
                folder,
                stop,
                security,
                grace_s=recipe.run.grace_s,
                trace=ProcessTrace(folder.path) if recipe.trace.max_gib else None,
                fleet=Fleet(folder.live_file, processes, make_specs=make_specs),
                backend=backend,
            )


def _specs(processes: Sequence[PlannedProcess], folder: RunFolder, security: Security) -> list[ProcessSpec]:
    return specs_of(processes, folder, security, lambda process: {})


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
