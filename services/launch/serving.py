"""Serves a model on this machine without a trainer: engines, router, reward service and workers."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.runtime.security import Security
from services.launch.background import background, repeated
from services.launch.checks.known_names import require_names
from services.launch.gpu_plan import find_gpus
from services.launch.launcher import (
    KILL_MARGIN_S,
    REFRESH_S,
    addressed,
    look_after,
    start_processes,
)
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.specs import process_specs
from services.launch.run_bus import require_bus
from services.launch.run_folder import RunFolder
from services.launch.run_plan import RunPlan, make_plan
from services.launch.supervisor import Supervisor, supervised
from services.recipe import Recipe
from services.rollout.engine.sglang import recipe_settings


def plan_serving(recipe: Recipe) -> RunPlan:
    """Return the processes that `serving` would start on this machine.

    Raises:
        ConfigError: there are too few GPUs, an evaluation set names a profile or environment that they do not know, or
            SGLang lacks a setting named in rollout.sglang.
    """
    recipe_settings.require_known(recipe.rollout.sglang)
    require_names(recipe, data=False, sets=True)
    return make_plan(recipe, find_gpus(), own_bus=not recipe.bus.url, trains=False)


@asynccontextmanager
async def serving(
    recipe: Recipe, folder: RunFolder, stop: asyncio.Event, security: Security, write: Callable[[str], None]
) -> AsyncIterator[tuple[Recipe, Supervisor]]:
    """Serve the recipe's model during the context, as policy version 0; no process is left afterwards.

    Yields the recipe with the addresses of this launch, and the processes' supervisor. `write` gets a line for each of
    their events. The processes are started, but may take minutes to become ready.

    Raises:
        AccessError: the recipe's NATS refuses the token.
        SetupError: a process listens on a port that the recipe gives, its NATS does not answer, or a nats-server
            serves the folder's store.
    """
    await require_bus(recipe, folder, security)
    with addressed(recipe, folder) as live:
        folder.write_live(live)
        plan = make_plan(live, find_gpus(), own_bus=not recipe.bus.url, trains=False)
        specs = process_specs(plan, folder, security)
        async with supervised(
            specs,
            logs=folder.logs,
            report=write,
            kill_after_s=recipe.run.grace_s + KILL_MARGIN_S,
            trace=ProcessTrace(folder.path) if recipe.trace.max_gib else None,
        ) as supervisor:
            look = functools.partial(look_after, supervisor, write, BoundedLog(folder.launcher_log))
            async with background(repeated(look, every_s=REFRESH_S)):
                await start_processes(supervisor, specs, write, stop)
                yield live, supervisor
        folder.forget_targets()
