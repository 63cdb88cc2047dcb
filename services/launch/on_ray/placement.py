"""Where the processes of a run may be placed, and whether a cluster has room for them. Pure: Ray is not asked.

NATS, router and reward service stay on the launcher's host, whose addresses all others know; they end with it anyway.
The trainer needs the run folder. Engines and workers run anywhere.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.errors import ConfigError
from services.launch.checks.precision import require_same_precision
from services.launch.run_plan import PlannedProcess
from services.recipe import Recipe

AT_THE_LAUNCHER: Final = ("nats", "reward", "router")
"""Services that stay on the launcher's host."""
ANYWHERE: Final = ("rollout", "worker", "trainer")
"""Services that may be on any host that is fit for them."""
_NODE_ID: Final = "ray.io/node-id"
"""The label with which Ray marks each node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node of the cluster, and what was found there."""

    node_id: str
    address: str
    """As the other nodes reach it."""
    num_gpus: int
    """GPUs that Ray manages, free or not."""
    num_cpus: int
    """CPUs that Ray manages, free or not; whoever starts Ray there may have given a smaller number than there are."""
    is_launchers: bool = False
    unfit: str = ""
    """Why no process can run there; empty if some can."""
    unfit_for: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a service cannot run there, by its name."""
    remark: str = dataclasses.field(default="", compare=False)
    """What a person should know of a host that is fit; empty if nothing. It says a number that varies."""
    sees_run_folder: bool = False

    def refuses(self, service: str) -> str:
        """Return why `service` cannot run there; empty if it can."""
        if service == "trainer" and not (self.sees_run_folder or self.is_launchers):
            return self.unfit or "it does not see the run folder"
        return self.unfit or self.unfit_for.get(service, "")


def num_gpus_of(service: str, recipe: Recipe, *, has_gpus: bool) -> int:
    """Return how many GPUs of one host a process of the service needs.

    `has_gpus` tells whether the run computes on GPUs; without, everything is computed on CPUs.
    """
    if not has_gpus:
        return 0
    needed = {
        "rollout": recipe.rollout.tensor_parallel,
        "trainer": recipe.trainer.ranks if recipe.trainer.device != "cpu" else 0,
    }
    return needed.get(service, 0)


def bundle(num_gpus: int) -> dict[str, float]:
    """Return the bundle of a placement group for one process. One CPU stands for the process: it may use more."""
    return {"CPU": 1.0, **({"GPU": float(num_gpus)} if num_gpus else {})}


def label_selector(node_ids: Sequence[str]) -> dict[str, str]:
    """Return the selector that restricts a bundle to these nodes; Ray does not strip spaces between them."""
    return {_NODE_ID: node_ids[0] if len(node_ids) == 1 else f"in({','.join(sorted(node_ids))})"}


def allowed(hosts: Sequence[Host], service: str) -> list[Host]:
    """Return the hosts on which a process of the service can run."""
    return [host for host in hosts if not host.refuses(service)]


def require_room(
    hosts: Sequence[Host], processes: Sequence[PlannedProcess], recipe: Recipe, *, has_gpus: bool
) -> list[PlannedProcess]:
    """Check that the hosts that can run the processes have enough GPUs and CPUs for all, if nobody else uses any.

    `has_gpus` tells whether the run computes on GPUs. Returns the processes that may be on several hosts, in an order
    in which they fit.

    Raises:
        ConfigError: they do not fit in any order tried, no host can run a service, the trainer must compute on a GPU
            and the run has none, or engines would refuse the precision of the trainer's pushes.
    """
    has_engines = any(process.service == "rollout" for process in processes)
    trains = any(process.service == "trainer" for process in processes)
    if trains and not has_gpus and recipe.trainer.device == "cuda":
        raise ConfigError(
            "trainer.device = 'cuda', and the cluster has no GPU; set it to 'auto' or 'cpu', or add hosts with GPUs"
        )
    if has_engines and trains:
        require_same_precision(recipe, has_gpus=has_gpus)
    if not has_gpus and has_engines and recipe.rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel = {recipe.rollout.tensor_parallel}, and the cluster has no GPU; set it to 1, or "
            "add hosts with GPUs"
        )
    order, missing = _placed(hosts, processes, recipe, has_gpus=has_gpus)
    if not missing:
        return order
    with_cpus = [dataclasses.replace(host, num_cpus=len(processes)) for host in hosts]
    if without_gpus := _placed(with_cpus, processes, recipe, has_gpus=has_gpus)[1]:
        raise ConfigError(_explain_too_few_gpus(hosts, processes, recipe, without_gpus))
    raise ConfigError(_explain_too_few_cpus(hosts, order, missing))


def require_room_to_join(
    hosts: Sequence[Host],
    added: Sequence[PlannedProcess],
    processes: Sequence[PlannedProcess],
    recipe: Recipe,
    *,
    has_gpus: bool,
) -> None:
    """Check that `added` can join a run, which then has `processes`; `has_gpus` tells whether it computes on GPUs.

    Engines must fit beside all others. Workers need a host that can run them: after the death of a host, engines of the
    run may have no room themselves.

    Raises:
        ConfigError: they do not fit, or no host can run a service.
    """
    adds_engines = any(process.service == "rollout" for process in added)
    require_room(hosts, processes if adds_engines else added, recipe, has_gpus=has_gpus)


def _placed(
    hosts: Sequence[Host], processes: Sequence[PlannedProcess], recipe: Recipe, *, has_gpus: bool
) -> tuple[list[PlannedProcess], list[str]]:
    """Return an order of the processes that may be on several hosts, and the names of those without room in it."""
    order: list[PlannedProcess] = []
    missing: list[str] = []
    for order in _orders(hosts, processes, recipe, has_gpus=has_gpus):
        missing = _without_room(hosts, order, recipe, has_gpus=has_gpus)
        if not missing:
            break
    return order, missing


def _orders(
    hosts: Sequence[Host], processes: Sequence[PlannedProcess], recipe: Recipe, *, has_gpus: bool
) -> Iterator[list[PlannedProcess]]:
    """Yield orders in which to place processes: the largest first, and the one with the least choice of hosts first."""
    anywhere = [process for process in processes if process.service not in AT_THE_LAUNCHER]

    def size(process: PlannedProcess) -> tuple[int, int, bool]:
        num_gpus = num_gpus_of(process.service, recipe, has_gpus=has_gpus)
        return -num_gpus, len(allowed(hosts, process.service)), process.service != "trainer"

    by_size = sorted(anywhere, key=size)
    yield by_size
    yield sorted(by_size, key=lambda process: process.service != "trainer")


def _without_room(
    hosts: Sequence[Host], order: Sequence[PlannedProcess], recipe: Recipe, *, has_gpus: bool
) -> list[str]:
    """Return those that find no room if each is placed on the fullest host that has enough, as Ray does."""
    free_gpus = {host.node_id: host.num_gpus for host in hosts}
    free_cpus = {host.node_id: host.num_cpus for host in hosts}
    missing = []
    for process in order:
        fit = allowed(hosts, process.service)
        if not fit:
            raise ConfigError(f"no host can run {process.name}: {'; '.join(_refusals(hosts, process.service))}")
        needed = num_gpus_of(process.service, recipe, has_gpus=has_gpus)
        with_room = [host.node_id for host in fit if free_gpus[host.node_id] >= needed and free_cpus[host.node_id]]
        if with_room:
            fullest = min(with_room, key=lambda node_id: (free_gpus[node_id], node_id))
            free_gpus[fullest] -= needed
            free_cpus[fullest] -= 1
        else:
            missing.append(process.name)
    return missing


def describe_hosts(hosts: Sequence[Host]) -> Iterator[str]:
    """Yield a line for each host, the launcher's first."""
    for host in sorted(hosts, key=lambda host: (not host.is_launchers, host.address, host.node_id)):
        name = f"host {host.address}{' (this one)' if host.is_launchers else ''}"
        if host.unfit:
            yield f"{name} is left out: {host.unfit}"
            continue
        yield f"{name}: {_count(host.num_gpus, 'GPU')}, {_count(host.num_cpus, 'CPU')}"
        if not (host.sees_run_folder or host.is_launchers):
            yield "  does not see the run folder: no trainer there"
        for service, reason in host.unfit_for.items():
            yield f"  no {service} there: {reason}"
        if host.remark:
            yield f"  {host.remark}"


def describe_processes(processes: Sequence[PlannedProcess], recipe: Recipe, *, has_gpus: bool) -> Iterator[str]:
    """Yield a line for each process."""
    width = max(len(process.name) for process in processes)
    for process in processes:
        num_gpus = num_gpus_of(process.service, recipe, has_gpus=has_gpus)
        where = "this host" if process.service in AT_THE_LAUNCHER else "any host"
        where += " with the run folder" if process.service == "trainer" else ""
        where += f", {_count(num_gpus, 'GPU')}" if num_gpus else ""
        yield f"{process.name.ljust(width)}  {where}"


def describe_weight_files(hosts: Sequence[Host], recipe: Recipe, *, has_gpus: bool) -> Iterator[str]:
    """Yield a line if weight files are in the run folder, and engines may be on hosts that do not see it."""
    sync = recipe.trainer.weight_sync
    if sync.transport != "disk" or sync.files_dir is not None:
        return
    needed = num_gpus_of("rollout", recipe, has_gpus=has_gpus)
    blind = [
        host.address
        for host in allowed(hosts, "rollout")
        if host.num_cpus and host.num_gpus >= needed and not (host.sees_run_folder or host.is_launchers)
    ]
    if blind:
        yield (
            f"trainer.weight_sync.transport = 'disk': engines on {', '.join(blind)} do not see the run folder, and get "
            "a broadcast instead of weight files; set run.dir or trainer.weight_sync.files_dir to a folder that all "
            "hosts share"
        )


def _refusals(hosts: Sequence[Host], service: str) -> list[str]:
    reasons = [host.refuses(service) for host in hosts]
    if len(set(reasons)) == 1 and reasons[0] not in ("", "it does not see the run folder"):
        return [reasons[0]]
    return [f"{host.address}: {reason}" for host, reason in zip(hosts, reasons, strict=True)]


def _explain_too_few_gpus(
    hosts: Sequence[Host], processes: Sequence[PlannedProcess], recipe: Recipe, missing: Sequence[str]
) -> str:
    num_engines = sum(process.service == "rollout" for process in processes)
    ranks = num_gpus_of("trainer", recipe, has_gpus=True)
    described = ", ".join(f"{host.address} {0 if host.unfit else host.num_gpus}" for host in hosts)
    left_out = [f"{host.address} is left out: {host.unfit}" for host in hosts if host.unfit and host.num_gpus]
    if "trainer" in missing:
        seeing = [host.address for host in allowed(hosts, "trainer")]
        return (
            f"trainer.ranks = {ranks} needs {ranks} GPUs of one host that has the run folder; hosts with it: "
            f"{', '.join(seeing)}; GPUs by host: {described}; set run.dir to a folder that hosts with GPUs share, or "
            "lower trainer.ranks" + "".join(f"; {line}" for line in left_out)
        )
    return (
        f"{num_engines} engines with rollout.tensor_parallel = {recipe.rollout.tensor_parallel}, each on one host, and "
        f"a trainer with {ranks} GPUs do not fit: no room for {', '.join(missing)}; GPUs by host: {described}; lower "
        "the number of engines (rollout.replicas, prefill, decode), or add hosts to the cluster"
        + "".join(f"; {line}" for line in left_out)
    )


def _explain_too_few_cpus(hosts: Sequence[Host], order: Sequence[PlannedProcess], missing: Sequence[str]) -> str:
    described = ", ".join(f"{host.address} {0 if host.unfit else host.num_cpus}" for host in hosts)
    remedy = "start Ray on a host with a higher --num-cpus, add hosts, or lower rollout.replicas or worker.num"
    if "trainer" in missing:
        seeing = ", ".join(host.address for host in allowed(hosts, "trainer"))
        remedy = (
            f"the trainer needs a host that has the run folder ({seeing}): start Ray there with a higher --num-cpus, "
            "or set run.dir to a folder that hosts with CPUs share"
        )
    return (
        f"no room for {', '.join(missing)}: the trainer, each engine and each worker take 1 CPU of Ray's count, "
        f"{len(order)} in all; CPUs by host: {described}; {remedy}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
