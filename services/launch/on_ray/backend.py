"""Starts the processes of a run as actors on a Ray cluster.

Invariant: each engine, each worker and the trainer has a placement group of its own, which keeps its GPUs between its
starts. A process that is lost with its host gives its group up and is placed anew, on whichever host has room. NATS,
router and reward service need no group: they are pinned to the launcher's host and take none of the resources that Ray
counts.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
import structlog
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.errors import SetupError
from penstock.runtime.files import write_atomically
from penstock.runtime.process import unless_stopped
from services.launch.on_ray import environment
from services.launch.on_ray.actor import Order, ProcessActor, Started
from services.launch.on_ray.cluster import Cluster, resolved
from services.launch.on_ray.placement import AT_THE_LAUNCHER, allowed, bundle, label_selector, num_gpus_of
from services.launch.process.backend import Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec
from services.launch.run_plan import PlannedProcess
from services.recipe import Recipe

_log = structlog.get_logger()

_START_TIMEOUT_S: Final = 180.0
"""For Ray to start an actor, whose imports may come from a slow disk."""
_PLACE_EVERY_S: Final = 5.0
"""Seconds after which a process that waits for a host is offered those that have joined."""
_MAX_TRIES: Final = 5
"""Starts of an actor that may fail in a row. What fails on one host may succeed on another."""
_READ_EVERY_S: Final = 0.5
_DRAIN_TIMEOUT_S: Final = 10.0


class RayProcess:
    """A process that an actor has started on some host."""

    def __init__(
        self, actor: Any, started: Started, spec: ProcessSpec, log_file: BoundedLog, lost: Callable[[], Awaitable[None]]
    ) -> None:
        """Copy its output to `log_file`; `lost` is awaited if its host, or the actor, dies."""
        self._actor = actor
        self._started = started
        self._spec = spec
        self._log = log_file
        self._lost = lost

    @property
    def address(self) -> str:
        """host:port on which it serves."""
        return self._started.address

    async def wait(self) -> Ending:
        """Wait for its end; then its log is complete and its error file is in the run folder."""
        ended = asyncio.Event()
        copying = asyncio.create_task(self._copy_output(ended))
        try:
            code, error = await resolved(self._actor.wait.remote())
            ended.set()
            if error is not None and self._spec.error_file is not None:
                self._keep_error(self._spec.error_file, error)
            await asyncio.wait({copying}, timeout=_DRAIN_TIMEOUT_S)
            with suppress(ray.exceptions.RayError, TimeoutError):
                await resolved(self._actor.close.remote(), timeout_s=_DRAIN_TIMEOUT_S)
            return Ending(code=code)
        except ray.exceptions.RayError as failure:
            _log.warning("process.lost", process=self._spec.name, host=self._started.host, reason=str(failure))
            await self._lost()
            return Ending(code=-signal.SIGKILL, lost=f"its host {self._started.host} is gone, or killed it")
        finally:
            copying.cancel()
            ray.kill(self._actor)

    def terminate(self) -> None:
        """Ask it to end; it ends its own children."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """Kill it and everything that it started."""
        self._actor.kill.remote()

    async def _copy_output(self, ended: asyncio.Event) -> None:
        """Append what it writes to its log in the run folder, until it has ended."""
        with suppress(ray.exceptions.RayError):
            while True:
                is_last = ended.is_set()
                if chunk := await resolved(self._actor.read.remote()):
                    await asyncio.to_thread(self._append, chunk)
                elif is_last:
                    return
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), _READ_EVERY_S)

    def _keep_error(self, file: Path, error: str) -> None:
        try:
            write_atomically(file, error)
        except OSError as failure:  # a full disk must not end the run; the log has the error too
            _log.warning("error.not_kept", process=self._spec.name, error=error, reason=str(failure))

    def _append(self, chunk: bytes) -> None:
        try:
            with self._log.path.open("ab") as file:
                file.write(chunk)
        except OSError as error:
            _log.warning("log.not_kept", process=self._spec.name, reason=str(error))


class RayBackend:
    """Starts processes as actors. Use it within the context of `connected`."""

    def __init__(self, cluster: Cluster, recipe: Recipe, *, has_gpus: bool, write: Callable[[str], None]) -> None:
        """Place processes of a run.

        Args:
            cluster: Its hosts have been examined.
            recipe: The recipe, with the addresses of this launch.
            has_gpus: Whether the run computes on GPUs.
            write: Gets lines for a person.
        """
        self._cluster = cluster
        self._has_gpus = has_gpus
        self._recipe = recipe
        self._write = write
        self._groups: dict[str, PlacementGroup] = {}
        self._left_groups: list[PlacementGroup] = []
        """Given up, and still to be removed."""
        self._actor_class = ray.remote(ProcessActor)
        self._environment = environment.given()
        self._defaults = environment.defaults()

    async def start(self, spec: ProcessSpec, log: BoundedLog, stop: asyncio.Event) -> RayProcess | None:
        """Start the process where there is room for it, however long that takes, unless `stop` is set.

        Raises:
            SetupError: Ray fails to start its actor again and again.
        """
        reason = ""
        for _ in range(_MAX_TRIES):
            options = await self._place(spec.name, spec.service, stop)
            if options is None:
                return None
            actor = self._actor_class.options(max_restarts=0, max_concurrency=8, **options).remote()
            try:
                starting = resolved(actor.start.remote(self._order(spec)), timeout_s=_START_TIMEOUT_S)
                started = await unless_stopped(starting, stop)
            except (ray.exceptions.RayError, TimeoutError) as error:
                ray.kill(actor)
                reason = " ".join(str(error).split())[:500] or type(error).__name__
                self._write(f"{spec.name} could not be started: {reason}; it is placed anew")
                await self._give_up(spec.name)
                continue
            if started is None:
                ray.kill(actor)
                return None
            _log.info("process.placed", process=spec.name, host=started.host, node=started.node_id, pid=started.pid)
            return RayProcess(actor, started, spec, log, lambda: self._give_up(spec.name))
        raise SetupError(f"Ray could not start {spec.name} {_MAX_TRIES} times in a row; the last time: {reason}")

    async def forget(self, spec: ProcessSpec) -> None:
        """Give the process's placement group back."""
        await self._give_up(spec.name)

    async def reserve(self, processes: Sequence[PlannedProcess], stop: asyncio.Event, *, timeout_s: float) -> None:
        """Make the placement groups of processes, in this order, unless `stop` is set.

        Raises:
            SetupError: there is no room for one within `timeout_s`; others' are given back.
        """
        for process in processes:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._place(process.name, process.service, stop, says_so=False)
            except TimeoutError:
                for name in list(self._groups):
                    await self._give_up(name)
                free = ray.available_resources()
                raise SetupError(
                    f"no room for {process.name} ({self._needs(process.service)}): {free.get('GPU', 0):g} GPUs and "
                    f"{free.get('CPU', 0):g} CPUs of the cluster are free, on all hosts together; other jobs use the "
                    "rest (`ray status`): end them, add hosts, or lower rollout.replicas"
                ) from None

    async def _place(
        self, name: str, service: str, stop: asyncio.Event, *, says_so: bool = True
    ) -> dict[str, Any] | None:
        """Return the options that place an actor on a host with room; None if `stop` is set first."""
        if service in AT_THE_LAUNCHER:
            return {
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(self._cluster.launcher_id, soft=False),
            }
        num_gpus = self._num_gpus(service)
        while not stop.is_set():
            try:
                group = await self._group_of(name, service)
                if group is not None:
                    is_ready = await unless_stopped(resolved(group.ready(), timeout_s=_PLACE_EVERY_S), stop)
                    if is_ready is None:
                        break
                    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
                    return {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy}
                await unless_stopped(asyncio.sleep(_PLACE_EVERY_S), stop)
            except TimeoutError:
                await self._give_up(name)
            except ray.exceptions.RayError as error:  # Ray's head is away for a moment, or the group's host has died
                _log.warning("process.not_placed", process=name, reason=str(error))
                await self._give_up(name)
                await unless_stopped(asyncio.sleep(_PLACE_EVERY_S), stop)
            if says_so:
                self._write(f"{name} waits for a host with room ({self._needs(service)})")
                says_so = False
        await self._give_up(name)
        return None

    async def _group_of(self, name: str, service: str) -> PlacementGroup | None:
        """Return the process's placement group, which is new if it had none; None if no host is fit for it."""
        if name not in self._groups:
            await self._cluster.notice()
            await self._remove_left_groups()
            if fit := allowed(self._cluster.hosts, service):
                self._groups[name] = placement_group(
                    [bundle(self._num_gpus(service))],
                    strategy="STRICT_PACK",
                    bundle_label_selector=[label_selector([host.node_id for host in fit])],
                )
        return self._groups.get(name)

    async def _give_up(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            self._left_groups.append(group)
            await self._remove_left_groups()

    async def _remove_left_groups(self) -> None:
        """Remove the groups that were given up; those that Ray does not remove now keep their room until later."""
        while self._left_groups:
            group = self._left_groups.pop()  # another task may remove others meanwhile
            try:
                await asyncio.to_thread(remove_placement_group, group)
            except ray.exceptions.RayError as error:  # its head is away for a moment
                _log.warning("placement_group.not_removed", reason=str(error))
                self._left_groups.append(group)
                return

    def _num_gpus(self, service: str) -> int:
        return num_gpus_of(service, self._recipe, has_gpus=self._has_gpus)

    def _needs(self, service: str) -> str:
        num_gpus = self._num_gpus(service)
        return f"1 CPU{f' and {num_gpus} GPUs' if num_gpus else ''}"

    def _order(self, spec: ProcessSpec) -> Order:
        replaced = {sys.executable: "python"}
        replaced |= {} if spec.recipe_file is None else {str(spec.recipe_file): "recipe"}
        replaced |= {} if spec.error_file is None else {str(spec.error_file): "error"}
        is_service = spec.service != "nats"
        return Order(
            name=spec.name,
            command=list(spec.command),
            replaced=replaced if is_service else {},
            environment={**self._environment, **spec.environment},
            defaults=self._defaults,
            port=int(spec.address.rpartition(":")[2] or 0),
            port_key=spec.port_key,
            takes_host=is_service,
            advertises_only=self._recipe.network.local != self._recipe.network.host,
            recipe_text="" if spec.recipe_file is None else spec.recipe_file.read_text(encoding="utf-8"),
            folder=os.getcwd(),
        )
