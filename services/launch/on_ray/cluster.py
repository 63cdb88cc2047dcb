"""A Ray cluster as a run sees it: its hosts, what they are fit for, and the launcher's own place among them."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock import config as configuration
from penstock.errors import ConfigError, SetupError
from services.launch.config import LaunchConfig
from services.launch.on_ray import facts, inputs_check
from services.launch.on_ray.placement import Host, describe_hosts
from services.recipe import Recipe

_CONNECT_TIMEOUT_S: Final = 5.0
_LOOK_TIMEOUT_S: Final = 120.0
"""A host whose Python loads from a slow disk, or that installs a job's packages, answers late."""
_CHECK_TIMEOUT_S: Final = 600.0
"""Rows of data sets are read for up to a minute, and packages are imported."""


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
    """The hosts of the connected cluster. New ones are examined when `look` is called, dead ones are forgotten."""

    def __init__(self, recipe: Recipe, run_folder: Path | None) -> None:
        """Examine hosts for a run of `recipe`; None: the run folder is not there yet, and assumed to be shared."""
        self._recipe_text = configuration.dump(recipe)
        self._run_folder = run_folder
        self._own = facts.look("")
        self._hosts: dict[str, Host] = {}
        self.lines: list[str] = []
        """What the checks on the hosts have to say to a person."""
        self.report: Callable[[str], None] = lambda line: None
        """Gets a line for each host that comes or goes."""
        self._looking = asyncio.Lock()
        context = ray.get_runtime_context()
        self.launcher_id: str = context.get_node_id()
        self.own_address: str = ray.util.get_node_ip_address()
        ray.cloudpickle.register_pickle_by_value(facts)

    @property
    def hosts(self) -> list[Host]:
        """The hosts that were alive when they were last looked for."""
        return list(self._hosts.values())

    @property
    def has_gpus(self) -> bool:
        """Whether a fit host has GPUs."""
        return any(host.num_gpus for host in self.hosts if not host.unfit)

    async def look(self) -> None:
        """Examine the hosts that are new, and forget those that have died."""
        async with self._looking:
            alive = {node["NodeID"]: node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
            for node_id in self._hosts.keys() - alive.keys():
                self.report(f"host {self._hosts.pop(node_id).address} is gone")
            new = [node for node_id, node in alive.items() if node_id not in self._hosts]
            if not new:
                return
            with self._mark() as mark:
                for host in await asyncio.gather(*(self._examine(node, mark) for node in new)):
                    self._hosts[host.node_id] = host
                    for line in describe_hosts([host]):
                        self.report(line)

    async def _examine(self, node: dict[str, Any], mark: str) -> Host:
        host = Host(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_gpus=int(node["Resources"].get("GPU", 0)),
            is_launchers=node["NodeID"] == self.launcher_id,
        )
        try:
            found = await self._ask(host, facts.look, mark, timeout_s=_LOOK_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            return dataclasses.replace(host, unfit=f"it did not answer ({_first_line(error)[:200]})")
        if unfit := facts.difference(found, self._own):
            return dataclasses.replace(host, unfit=unfit)
        host = dataclasses.replace(host, sees_run_folder=found["sees_run_folder"] or self._run_folder is None)
        services = ["rollout", "worker", *(["trainer"] if not host.refuses("trainer") else [])]
        try:
            reasons, lines = await self._ask(
                host, inputs_check.check, self._recipe_text, services, os.getcwd(), timeout_s=_CHECK_TIMEOUT_S
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            return dataclasses.replace(host, unfit=f"its check failed ({_first_line(error)[:200]})")
        self.lines += [line for line in lines if line not in self.lines]
        return dataclasses.replace(host, unfit_for=reasons)

    async def _ask(self, host: Host, function: Any, *arguments: Any, timeout_s: float) -> Any:
        strategy = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
        return await resolved(task.remote(*arguments), timeout_s=timeout_s)

    @contextlib.contextmanager
    def _mark(self) -> Iterator[str]:
        """Yield a file in the run folder that exists during the context."""
        if self._run_folder is None:
            yield ""
            return
        file = self._run_folder.absolute() / f".host-check-{secrets.token_hex(8)}"
        file.touch()
        try:
            yield str(file)
        finally:
            file.unlink(missing_ok=True)


async def resolved(reference: Any, *, timeout_s: float | None = None) -> Any:
    """Wait for the value of a Ray object.

    Raises:
        RayError: its task or actor failed.
        TimeoutError: it is not there after `timeout_s`.
    """
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
