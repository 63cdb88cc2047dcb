"""Runs a whole training run: its processes, their addresses, and the display. By default all are on this machine.

All processes are started at once and find each other through addresses fixed beforehand, so each can die and come back
while the others notice only its absence.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

from penstock.errors import PenstockError, SetupError
from penstock.runtime.ports import held_port, held_ports
from penstock.runtime.security import Security
from services.launch.background import background, repeated
from services.launch.gpu_plan import extend_plan, find_gpus, require_own_gpus, without
from services.launch.metrics import SUMMED_UP, MetricsFollower, StepRow, describe_run
from services.launch.process.backend import Backend
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.child import Child
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.readiness import serves_nats
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.process.specs import process_specs
from services.launch.run_bus import bus_host, reach_of, require_bus
from services.launch.run_folder import RunFolder
from services.launch.run_follower import RunFollower
from services.launch.run_plan import LOCAL, PORTS, SERVING, PlannedProcess, RunPlan, make_plan
from services.launch.run_status import describe_phase, fetch_run
from services.launch.scaling import request
from services.launch.scaling.fleet import Fleet
from services.launch.supervisor import Supervisor, supervised
from services.launch.terminal.display import Display, open_display
from services.launch.terminal.lasting_output import lasting_output
from services.launch.terminal.pace import Pace
from services.recipe import Recipe
from services.view.completion import is_complete

_BUS_START_TIMEOUT_S = 60.0
"""Seconds for which the other processes are not started if the bus does not listen; on Ray its actor starts first."""
REFRESH_S = 0.5
"""Seconds between updates of the display and checks of the processes."""
KILL_MARGIN_S = 10.0
"""A process that is asked to stop is killed after `run.grace_s` and this many seconds: after its grace an engine sends
its last answers (2 s) and ends SGLang's processes, which takes seconds on a busy machine."""


def plan_run(recipe: Recipe) -> RunPlan:
    """Return the processes that a run of `recipe` would start on this machine.

    Raises:
        ConfigError: there are too few GPUs.
    """
    return make_plan(recipe, find_gpus(), own_bus=not recipe.bus.url)


async def launch(recipe: Recipe, folder: RunFolder, stop: asyncio.Event, security: Security) -> bool:
    """Run `recipe` in `folder` to its end, or until `stop` is set; no process is left afterwards.

    The folder keeps the recipe once only a process can still refuse it. Returns whether the run is complete.

    Raises:
        UserError: the recipe's NATS does not answer, a nats-server serves the run's store, or a process found a fault
            that a person must fix.
        ProcessFailedError: a process died too often.
    """
    folder.forget_targets()
    await require_bus(recipe, folder, security)
    host = LOCAL if recipe.bus.url else bus_host(recipe.network)
    with lasting_output(), addressed(recipe, folder, host=host) as live:
        folder.write_live(live)
        plan = make_plan(live, find_gpus(), own_bus=not recipe.bus.url)
        reach = await asyncio.to_thread(reach_of, host)
        sys.stdout.write("\n".join([f"run folder {folder.path}", *plan.describe(), *reach, ""]))
        specs = process_specs(plan, folder, security)
        trace = ProcessTrace(folder.path) if recipe.trace.max_gib else None
        fleet = local_fleet(plan, folder, security)
        folder.write_config(recipe)
        return await run_processes(specs, folder, stop, security, grace_s=recipe.run.grace_s, trace=trace, fleet=fleet)


def local_fleet(plan: RunPlan, folder: RunFolder, security: Security) -> Fleet:
    """Return the processes of `plan`; further engines get GPUs that no process has."""

    def make_specs(recipe: Recipe, added: Sequence[PlannedProcess]) -> list[ProcessSpec]:
        nonlocal plan
        engines = [process.name for process in added if process.service == "rollout"]
        gpus = extend_plan(plan.gpus, engines, tensor_parallel=recipe.rollout.tensor_parallel)
        plan = RunPlan(processes=plan.processes, gpus=gpus)
        return process_specs(RunPlan(processes=added, gpus=gpus), folder, security)

    def require_dispensable(names: Sequence[str]) -> None:
        if any(name in plan.gpus.of_process for name in names):
            require_own_gpus(plan.gpus)

    def forget(name: str) -> None:
        nonlocal plan
        plan = RunPlan(processes=plan.processes, gpus=without(plan.gpus, name))

    return Fleet(
        folder.live_file,
        plan.processes,
        make_specs=make_specs,
        require_dispensable=require_dispensable,
        forget=forget,
    )


async def run_processes(
    specs: Sequence[ProcessSpec],
    folder: RunFolder,
    stop: asyncio.Event,
    security: Security,
    *,
    grace_s: float,
    trace: ProcessTrace | None = None,
    fleet: Fleet | None = None,
    backend: Backend | None = None,
) -> bool:
    """Run the processes until the one that ends the run has ended or `stop` is set; show them and the run's result.

    Returns whether the run is complete, which it also is if `stop` came when there was nothing left to do.

    Args:
        specs: The processes at the start.
        folder: Gets their logs.
        stop: Ends the run in order.
        security: Has the tokens with which the trainer is asked for its progress.
        grace_s: Seconds that processes give to running work when they are asked to stop.
        trace: Gets starts and ends of processes.
        fleet: Answers requests to change their number; None: nobody does.
        backend: Starts them; None: they run on this machine.

    Raises:
        UserError: a process found a fault that a person must fix.
        ProcessFailedError: a process died too often.
    """
    request.forget_all(folder)  # first: requests that come while files are read are answered later
    metrics = MetricsFollower(folder.metrics_file, keep=SUMMED_UP.__contains__)
    await asyncio.to_thread(metrics.poll)
    evaluations = MetricsFollower(folder.evaluations_file)
    evaluations.poll()
    follower = RunFollower(folder.path, metrics, evaluations)
    display = open_display(str(folder.path))
    try:
        async with (
            supervised(
                specs,
                logs=folder.logs,
                report=display.write,
                kill_after_s=grace_s + KILL_MARGIN_S,
                trace=trace,
                backend=backend,
            ) as supervisor,
            _watched(supervisor, follower, display, BoundedLog(folder.launcher_log)),
            _scaled(supervisor, fleet, folder, display.write),
        ):
            try:
                await start_processes(supervisor, specs, display.write, stop)
                await supervisor.wait(stop)
            finally:
                if stop.is_set():
                    display.write("stopping; Ctrl-C again kills all processes at once")
                async with _trainer_reported(supervisor, display, security):
                    await supervisor.stop()
        new_rows = follower.poll(display.write)  # the trainer may have finished a step after it was asked to stop
        display.show(supervisor.children, metrics.rows, new_rows, follower.status(is_running=False))
    finally:
        display.close()
        folder.forget_targets()
    is_done = is_complete(folder.path, metrics.rows, evaluations.rows)
    _write_result(folder, metrics, is_done=is_done, was_stopped=stop.is_set())
    return is_done


@contextmanager
def addressed(
    recipe: Recipe, folder: RunFolder, *, host: str = LOCAL, on_this_machine: Collection[str] = SERVING
) -> Iterator[Recipe]:
    """Yield the recipe with its run folder, its bus and a port for each server without one; all ports are held during
    the context, including those that the recipe gives.

    The processes start later, and again whenever they die: no other program can take their ports in between.

    Args:
        recipe: The recipe.
        folder: The run's folder.
        host: This machine's address, on which the bus listens.
        on_this_machine: The services that run here; the others' ports are left as they are.

    Raises:
        SetupError: a process listens on a port that the recipe gives.
    """
    tree = recipe.model_dump()
    tree["run"]["folder"] = folder.path
    with ExitStack() as held:
        for section, name in PORTS:
            if section in on_this_machine and (port := tree[section][name]):
                held.enter_context(held_port(recipe.network.host, port, key=f"{section}.{name}"))
        ports = iter(held.enter_context(held_ports(4, host=host)))
        if not recipe.bus.url:
            tree["bus"]["url"] = f"nats://{host}:{next(ports)}"
        for section in ("reward", "router", "trainer"):
            if section in on_this_machine:
                tree[section]["port"] = tree[section]["port"] or next(ports)
        yield Recipe.model_validate(tree)


async def start_processes(
    supervisor: Supervisor, specs: Sequence[ProcessSpec], write: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Start the bus and then, as soon as it listens, all others at once; start none after a signal to stop.

    Raises:
        SetupError: the bus has ended before it listened.
    """
    write(f"starting {', '.join(spec.name for spec in specs)} ...")
    for spec in specs:
        if stop.is_set() or supervisor.has_ended:
            return
        child = supervisor.start(spec.name)
        if spec.phase is StopPhase.BUS:
            await _until_it_listens(child, supervisor, stop)


async def _until_it_listens(bus: Child, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Return when the nats-server listens, or after a while; the processes that need it then report the fault.

    Raises:
        SetupError: it has ended by itself. What it cannot do at the start, such as read its store, no restart mends.
    """
    address = bus.spec.address

    def has_given_up() -> bool:
        return bus.ending is not None and bus.ending.code > 0 and not bus.ending.lost and not bus.ending.not_started

    async def is_over() -> bool:
        return stop.is_set() or supervisor.has_ended or has_given_up() or await serves_nats(address)

    with suppress(TimeoutError):
        async with asyncio.timeout(_BUS_START_TIMEOUT_S):
            while not await is_over():  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.02)
    if bus.ending is not None and has_given_up() and not stop.is_set():
        how = f"{bus.spec.name} {bus.ending.describe()} before it listened on {address}"
        why = "".join(f": {line}" for line in bus.log.last_lines(1))
        raise SetupError(f"{how}{why}; mend that and start again; its log is {bus.log.path}")


@asynccontextmanager
async def _watched(
    supervisor: Supervisor, follower: RunFollower, display: Display, own_log: BoundedLog
) -> AsyncIterator[None]:
    """Note the run's progress twice a second, show it at most as often, and keep the logs within their bound."""
    pace = Pace()
    unshown: list[StepRow] = []
    evaluated: list[str] = []

    def read() -> None:
        unshown.extend(follower.poll(evaluated.append))

    def show() -> None:
        new_rows = unshown.copy()
        unshown.clear()
        display.show(supervisor.children, follower.rows, new_rows, follower.status(is_running=True))

    async def look() -> None:
        await look_after(supervisor, display.write, own_log)
        num_known = len(unshown)
        # In a thread: a restarted trainer replaces its file, and to read all of a long one takes half a minute.
        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            await asyncio.shield(reading)
        finally:  # when it is cancelled, too: the last look goes on where this one ends
            await asyncio.wait({reading})
            while evaluated:
                display.write(evaluated.pop(0))
        if len(unshown) > num_known:
            supervisor.note_progress()
        pace.when_due(show)

    async with background(repeated(look, every_s=REFRESH_S)):
        yield
    if unshown:
        show()


@asynccontextmanager
async def _scaled(
    supervisor: Supervisor, fleet: Fleet | None, folder: RunFolder, write: Callable[[str], None]
) -> AsyncIterator[None]:
    """Answer the requests of `penstock scale`; while processes still wait for the bus to be started, requests wait."""

    async def answer() -> None:
        if fleet is None or not (supervisor.has_started_all or supervisor.has_begun_to_stop):
            return
        for asked in request.pending(folder):
            try:
                lines = fleet.scale(asked.counts, supervisor)
            except PenstockError as error:
                asked.refuse(str(error))
                continue
            for line in lines:
                write(f"penstock scale: {line}")
            asked.answer(lines)

    async with background(repeated(answer, every_s=REFRESH_S)):
        yield


async def look_after(supervisor: Supervisor, write: Callable[[str], None], own_log: BoundedLog) -> None:
    """Report the processes that have become ready since the last call, and keep the logs within their bound."""
    children = list(supervisor.children)  # they may change meanwhile
    are_new = await asyncio.gather(*(child.check_ready() for child in children))
    for child, is_new in zip(children, are_new, strict=True):
        if is_new:
            write(f"{child.spec.name} is up after {child.age_s:.1f} s")
    for each in (own_log, *(child.log for child in children)):
        await asyncio.to_thread(each.bound)


@asynccontextmanager
async def _trainer_reported(supervisor: Supervisor, display: Display, security: Security) -> AsyncIterator[None]:
    """Report what the trainer is still doing, whenever that changes: stopping waits for it without a limit."""
    trainer = next((child for child in supervisor.children if child.spec.ends_run), None)

    async def report() -> None:
        last = ""
        while trainer is not None:
            run = await fetch_run(trainer.address, security)
            phase = "" if run is None else describe_phase(run)
            if phase and phase != last:
                display.write(f"waiting for the trainer: {phase}")
            last = phase
            await asyncio.sleep(REFRESH_S)

    async with background(report()):
        yield


def _write_result(folder: RunFolder, metrics: MetricsFollower, *, is_done: bool, was_stopped: bool) -> None:
    lines = [*describe_run(metrics.rows), f"folder  {folder.path}"]
    if (curves := folder.path / "curves.png").exists():
        lines.append(f"curves  {curves}")
    lines.append(f"view    penstock view {folder.path}")
    if not is_done:
        lines.append(f"stopped; `penstock train --resume {folder.path}` continues the run")
    elif was_stopped:
        lines.append("the run is complete: nothing was left to stop")
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.flush()
