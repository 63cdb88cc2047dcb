"""A Ray cluster as a run sees it: its hosts, what they are fit for, and the launcher's own place among them."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock import config as configuration
from penstock.errors import ConfigError, SetupError
from services.doctor.hosts.clocks import ahead_s
from services.launch.config import LaunchConfig
from services.launch.on_ray import clocks, environment, facts, inputs_check, versions
from services.launch.on_ray.placement import ANYWHERE, Host, describe_hosts
from services.recipe import Recipe

_log = structlog.get_logger()

_CONNECT_TIMEOUT_S: Final = 5.0
_LOOK_TIMEOUT_S: Final = 120.0
"""A host whose Python loads from a slow disk, or that installs a job's packages, answers late."""
_CHECK_TIMEOUT_S: Final = 600.0
"""Rows of data sets are read for up to a minute, and packages are imported."""
_AGAIN_AFTER_S: Final = 120.0
"""Seconds after which a host that something refuses is examined again: a person may have mended it."""


@contextlib.contextmanager
def connected(config: LaunchConfig) -> Iterator[None]:
    """Be connected to the Ray cluster of `launch.ray_address` during the context.

    Raises:
        ConfigError: the address is none of a cluster's head.
        SetupError: there is no cluster, this machine is no node of it, or its Python or Ray is another version.
    """
    address = config.ray_address
    named = f"launch.ray_address = {address!r}"
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if "://" in known:
        raise ConfigError(
            f"{named}: {known} is for Ray's client, whose program is on no node; run `penstock train` on a node of the "
            "cluster, or submit it: `ray job submit --address=http://HEAD:8265 -- penstock train ...`"
        )
    if known and known != "auto":
        _require_listener(known, named)
    try:
        # Ray would put the working directory on the path of all its workers, in front of Penstock. The settings of a
        # submitted job are found in the environment.
        with contextlib.chdir("/"):
            ray.init(address=address, namespace="penstock", log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        what = "there is no Ray cluster on this machine" if address == "auto" else _first_line(error)
        raise SetupError(
            f"{named}: {what}; start one with `ray start --head`, join one with `ray start --address=HEAD:6379`, or "
            "submit the run with `ray job submit`"
        ) from None
    except (RuntimeError, ValueError, OSError) as error:
        raise SetupError(
            f"{named}: {_first_line(error)}; this machine must be a node of the cluster (`ray start "
            "--address=HEAD:6379`) with the cluster's versions of Python and Ray, or submit the run with "
            "`ray job submit`"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str, named: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{named} is no address; write host:port of the cluster's head, or auto")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise SetupError(
            f"{named}: no Ray cluster answers at {address} ({error.strerror or error}); start its head with `ray start "
            "--head`, or correct the address"
        ) from None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Cluster:
    """The hosts of the connected cluster.

    A host is examined when it is new, and from time to time while it refuses a service. Each examination is a task of
    its own, so a host that answers late delays nothing that has room elsewhere.
    """

    def __init__(self, recipe: Recipe, run_folder: Path) -> None:
        """Examine hosts for a run of `recipe`; `run_folder` is its folder, or the one in which that would be made."""
        self._recipe_text = configuration.dump(recipe)
        self._run_folder = run_folder
        self._own = facts.look("")
        self._hosts: dict[str, Host] = {}
        self._examined_at: dict[str, float] = {}
        self._examinations: dict[str, asyncio.Task[None]] = {}
        self._noticing = asyncio.Lock()
        self.lines: list[str] = []
        """What the checks on the hosts have to say to a person."""
        self.report: Callable[[str], None] = lambda line: None
        """Gets a line for each host that comes, goes or has changed."""
        context = ray.get_runtime_context()
        self.launcher_id: str = context.get_node_id()
        self.own_address: str = ray.util.get_node_ip_address()
        ray.cloudpickle.register_pickle_by_value(facts)

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have been examined and were alive when they were last looked for."""
        return list(self._hosts.values())

    @property
    def has_gpus(self) -> bool:
        """Whether a host has GPUs, fit or not: a run whose only GPUs are on unfit hosts is refused, not put on CPUs."""
        return any(host.num_gpus for host in self.hosts)

    async def look(self) -> None:
        """Look for hosts, and wait until those that are new are examined."""
        await self.notice()
        await asyncio.gather(*self._examinations.values())

    async def notice(self) -> None:
        """Look for hosts: forget those that have died, and begin to examine those that are due."""
        async with self._noticing:
            alive = {node["NodeID"]: node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
            for node_id in self._hosts.keys() - alive.keys():
                self.report(f"host {self._hosts.pop(node_id).address} is gone")
            for node_id in self._examinations.keys() - alive.keys():
                self._examinations[node_id].cancel()
            for node_id in filter(self._is_due, alive):
                task = asyncio.create_task(self._look_at(alive[node_id]))
                self._examinations[node_id] = task
                task.add_done_callback(functools.partial(self._end_examination, node_id))

    async def keep_noticing(self, *, every_s: float) -> None:
        """Look for hosts until cancelled, so that `penstock scale` knows what there is room for."""
        try:
            while True:
                try:
                    await self.notice()
                except ray.exceptions.RayError as error:
                    _log.warning("hosts.not_seen", reason=_first_line(error))
                await asyncio.sleep(every_s)
        finally:
            for examination in self._examinations.values():
                examination.cancel()

    def _end_examination(self, node_id: str, _: asyncio.Task[None]) -> None:
        del self._examinations[node_id]

    def _is_due(self, node_id: str) -> bool:
        if node_id in self._examinations:
            return False
        host = self._hosts.get(node_id)
        if host is None:
            return True
        age_s = time.monotonic() - self._examined_at[node_id]
        return bool(_refused(host)) and age_s >= _AGAIN_AFTER_S

    async def _look_at(self, node: dict[str, Any]) -> None:
        node_id = node["NodeID"]
        before = self._hosts.get(node_id)
        found = await self._examine(node, before)
        self._examined_at[node_id] = time.monotonic()
        self._hosts[node_id] = found
        if found != before:
            for line in describe_hosts([found]):
                self.report(line)

    async def _examine(self, node: dict[str, Any], before: Host | None) -> Host:
        """Return what the host is now; what it did not refuse before is not examined again."""
        host = Host(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_gpus=int(node["Resources"].get("GPU", 0)),
            num_cpus=int(node["Resources"].get("CPU", 0)),
            is_launchers=node["NodeID"] == self.launcher_id,
        )
        try:
            with self._mark() as mark:
                found = await self._ask(host, facts.look, mark, timeout_s=_LOOK_TIMEOUT_S)
            seconds = await self._ahead_s(host)
            clock = clocks.describe(seconds)
            unfit = versions.difference(found, self._own) or (clock if clocks.is_broken(seconds) else "")
            if unfit:
                return dataclasses.replace(host, unfit=unfit)
            remarks = "; ".join(filter(None, (versions.describe_builds(found, self._own), clock)))
            host = dataclasses.replace(host, sees_run_folder=found["sees_run_folder"], remark=remarks)
            doubtful = ANYWHERE if before is None else _refused(before)
            services = [name for name in doubtful if name != "trainer" or host.sees_run_folder or host.is_launchers]
            if not services:
                return host
            asked = (self._recipe_text, services, os.getcwd(), environment.defaults())
            reasons, lines = await self._ask(host, inputs_check.check, *asked, timeout_s=_CHECK_TIMEOUT_S)
        except (ray.exceptions.RayError, OSError) as error:  # a time-out is an OSError too
            if before is not None and not before.unfit:
                return before
            return dataclasses.replace(host, unfit=f"it could not be examined ({_first_line(error)[:200]})")
        self.lines += [line for line in lines if line not in self.lines]
        return dataclasses.replace(host, unfit_for=reasons)

    async def _ahead_s(self, host: Host) -> float:
        """Return by how many seconds the host's clock is ahead of the one here; negative: behind.

        Ask when the host has just answered something else: its Python runs, so the answer takes milliseconds.
        """
        asked_at = time.time()
        clock = await self._ask(host, facts.clock, timeout_s=_LOOK_TIMEOUT_S)
        return ahead_s(asked_at=asked_at, heard_at=clock, said_at=clock, answered_at=time.time())

    async def _ask(self, host: Host, function: Any, *arguments: Any, timeout_s: float) -> Any:
        strategy = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
        answer = task.remote(*arguments)
        try:
            return await resolved(answer, timeout_s=timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(answer, force=True)  # it would stay with its process, one for each time that the host is asked
            raise

    @contextlib.contextmanager
    def _mark(self) -> Iterator[str]:
        """Yield a file in the run folder that exists during the context."""
        file = self._run_folder.absolute() / f".host-check-{secrets.token_hex(8)}"
        file.touch()
        try:
            yield str(file)
        finally:
            file.unlink(missing_ok=True)


def _refused(host: Host) -> list[str]:
    return [service for service in ANYWHERE if host.refuses(service)]


async def resolved(reference: Any, *, timeout_s: float | None = None) -> Any:
    """Wait for the value of a Ray object.

    Raises:
        RayError: its task or actor failed.
        TimeoutError: it is not there after `timeout_s`.
    """
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
