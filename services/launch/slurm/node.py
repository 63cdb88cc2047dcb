"""What a node other than the first runs: engines and workers that join the run of the first by its live.toml.

The launcher of the first node ends the run, and the job then removes live.toml. A signal to this node, which Slurm
sends to all nodes at once, ends its processes only when the trainer has ended: until then it may need them for a push.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import structlog

from penstock import config as configuration
from penstock.errors import ConfigError
from penstock.runtime.security import Security
from services.launch.background import background, repeated
from services.launch.gpu_plan import find_gpus
from services.launch.launcher import KILL_MARGIN_S, REFRESH_S, look_after
from services.launch.metrics import MetricsFollower
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.readiness import serves_grpc, serves_nats
from services.launch.process.spec import StopPhase
from services.launch.process.specs import process_specs
from services.launch.run_folder import RunFolder
from services.launch.run_plan import PlannedProcess, RunPlan, assign_gpus
from services.launch.slurm.placement import ROLES, NodeShare
from services.launch.supervisor import supervised
from services.recipe import Recipe

log = structlog.get_logger()

_SILENT_S = 30.0
"""Seconds without an answer of NATS after which a node that waits for it says so."""
_ABSENT_S = 10.0
"""Seconds without an answer after which the trainer is taken to have ended."""


async def serve_node(
    folder: RunFolder,
    share: NodeShare,
    overrides: Sequence[str],
    stop: asyncio.Event,
    security: Security,
    write: Callable[[str], None],
) -> None:
    """Serve the run in `folder` with `share` of its processes, until `stop` and the end of its trainer.

    Args:
        folder: The run folder, which the first node's launcher uses.
        share: Engines and workers of this node.
        overrides: Settings in which this node differs from the first: its own [network].
        stop: Set by SIGTERM.
        security: The run's tokens and TLS.
        write: Gets a line for each event.

    Raises:
        UserError: a process found a fault that a person must fix.
        ProcessFailedError: a process died too often.
    """
    live = await find_run(folder, stop, write)
    if live is None:
        return
    node = configuration.load(Recipe, [folder.live_file], overrides)
    plan = plan_node(node, share, [*overrides, *addresses_of_first(live)])
    write(f"serving {share.describe()}")
    own_log = BoundedLog(folder.logs / f"{node.network.advertised}.log")
    metrics = MetricsFollower(folder.metrics_file, keep=lambda _: False)
    async with supervised(
        process_specs(plan, folder, security),
        logs=folder.logs,
        report=write,
        kill_after_s=node.run.grace_s + KILL_MARGIN_S,
    ) as supervisor:

        async def look() -> None:
            await look_after(supervisor, write, own_log)
            if await asyncio.to_thread(metrics.poll):
                supervisor.note_progress()

        async with background(repeated(look, every_s=REFRESH_S)):
            for process in plan.processes:
                supervisor.start(process.name)
            # Of its own: a signal after the end of the run is then the first one, and kills nobody.
            ended = asyncio.Event()
            async with background(_set_at_the_end(folder, stop, ended)):
                await supervisor.wait(ended)
            await _until_the_trainer_ends(folder, f"{live.network.advertised}:{live.trainer.port}", security)
            await supervisor.stop()


def plan_node(node: Recipe, share: NodeShare, overrides: Sequence[str]) -> RunPlan:
    """Return the processes of a node, and its GPUs.

    Args:
        node: The recipe of this node.
        share: Its engines and workers.
        overrides: Settings in which its processes differ from those of the first node.

    Raises:
        ConfigError: it has too few GPUs.
    """
    processes = list(_processes(node, share, overrides))
    return RunPlan(processes=processes, gpus=assign_gpus(node, processes, find_gpus()))


def _processes(node: Recipe, share: NodeShare, overrides: Sequence[str]) -> Iterator[PlannedProcess]:
    name, local = node.network.advertised, node.network.local
    for role in ROLES:
        for index in range(getattr(share, role)):
            yield PlannedProcess(
                name=f"{name}-{'rollout' if role == 'unified' else role}-{index}",
                service="rollout",
                phase=StopPhase.SERVE,
                address=f"{local}:{node.rollout.port}",
                port_key="rollout.port",
                overrides=(f"--rollout.role={role}", *overrides),
            )
    for index in range(share.workers):
        yield PlannedProcess(
            name=f"{name}-worker-{index}",
            service="worker",
            phase=StopPhase.WORK,
            address=f"{local}:{node.worker.port}",
            port_key="worker.port",
            overrides=overrides,
        )


def addresses_of_first(live: Recipe) -> Iterator[str]:
    """Yield the settings by which workers find the services of the first node, as far as the recipe leaves them open.

    Args:
        live: The first node's live.toml.
    """
    worker, head = live.worker, live.network.advertised
    if not worker.router_address:
        yield f"--worker.router_address={head}:{live.router.port}"
    if not worker.reward_address:
        yield f"--worker.reward_address={head}:{live.reward.port}"
    if worker.agents and not worker.router_url and live.router.http_port:
        scheme = "http" if live.security.tls_cert is None and live.security.tls_ca is None else "https"
        yield f"--worker.router_url={scheme}://{head}:{live.router.http_port}"


async def _set_at_the_end(folder: RunFolder, stop: asyncio.Event, ended: asyncio.Event) -> None:
    while folder.live_file.exists() and not stop.is_set():  # noqa: ASYNC110 - another host has no event
        await asyncio.sleep(REFRESH_S)
    ended.set()


async def _until_the_trainer_ends(folder: RunFolder, trainer: str, security: Security) -> None:
    """Return once the run has no addresses any longer, or its trainer has not answered for a while.

    A single answer may be late, or the trainer may just be starting again; and its last push needs this node's engines.
    """
    seen_at = time.monotonic()
    while folder.live_file.exists() and time.monotonic() - seen_at < _ABSENT_S:
        if await serves_grpc(trainer, security):
            seen_at = time.monotonic()
        await asyncio.sleep(REFRESH_S)


async def find_run(
    folder: RunFolder,
    stop: asyncio.Event,
    write: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Recipe | None:
    """Wait for the addresses of this start of the run, until its NATS answers; None if `stop` comes first.

    A file of an earlier start may still be seen for a while, where folders are shared by NFS. `write` gets a line if
    there are addresses, and their NATS stays silent.
    """
    log.info("run.awaited", file=str(folder.live_file))
    silent_since: float | None = None
    is_told = False
    while not stop.is_set():
        with suppress(ConfigError):
            live = configuration.load(Recipe, [folder.live_file])
            if any([await serves_nats(f"{host}:{port}") for host, port in live.bus.addresses]):
                return live
            now = clock()
            silent_since = now if silent_since is None else silent_since
            if not is_told and now - silent_since >= _SILENT_S:
                is_told = True
                write(
                    f"{folder.live_file} names NATS at {live.bus.url}, which has not answered for {_SILENT_S:g} s; see "
                    "whether this host reaches it: its name in /etc/hosts or DNS, firewalls, the log of the first node"
                )
        await asyncio.sleep(REFRESH_S)
    return None
