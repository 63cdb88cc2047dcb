"""Life of a rollout engine: start SGLang, serve, hold a lease, drain.

SGLang starts first: it forks, so no other thread may run yet. If one of its processes dies or hangs, or call after call
crashes, this process drops its lease and ends with an error, so that its supervisor restarts it.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import structlog
from nats.js.kv import KeyValue

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import Bus, connect
from penstock.bus.image_store import ImageStore
from penstock.bus.span_stream import sending_spans
from penstock.config import NetworkConfig
from penstock.errors import SetupError, UnavailableError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.garbage import rare_collections
from penstock.runtime.ports import require_free_port
from penstock.runtime.process import unless_stopped
from penstock.runtime.security import Security
from penstock.telemetry.metrics import exposed
from penstock.telemetry.serving import serving_metrics
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from services.rollout.engine import disaggregation
from services.rollout.engine.config import MAX_PUSH_S, EngineSettings, RolloutConfig
from services.rollout.engine.crash_streak import CrashStreak
from services.rollout.engine.drain import Drain
from services.rollout.engine.generate_service import GenerateServicer
from services.rollout.engine.image_source import ImageSource
from services.rollout.engine.metrics import EngineMetrics
from services.rollout.engine.replica_view import ReplicaView
from services.rollout.engine.rollout_service import RolloutServicer
from services.rollout.engine.scratch_folder import note_segments, scratch_folder
from services.rollout.engine.sglang import settings
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.sglang.metrics import SglangMetrics
from services.rollout.engine.weight_sync.sglang_weights import SglangWeights
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver

log = structlog.get_logger()

_LOAD_INTERVAL_S = 1.0
_TRY_S = 8.0
"""Seconds of one try to reach NATS again, after which a signal is heeded."""
_RETRY_S = 1.0
"""Seconds between these tries."""
_LAST_WORDS_S = 2.0
"""Seconds that finished answers have to be sent."""
_OPEN_TIMEOUT_S = 120.0
"""As long as SGLang may take for its first answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineServer:
    """A running engine and its parts."""

    engine: SglangEngine
    receiver: WeightReceiver
    view: ReplicaView
    drain: Drain
    images: ImageSource
    crashes: CrashStreak
    changed: asyncio.Event
    """Set on every change that the lease must announce at once."""

    async def end_service(self, grace_s: float) -> None:
        """Drain, without grace if the engine died or is useless."""
        has_failed = self.engine.died.is_set() or self.crashes.is_useless.is_set()
        await self.drain.run(0.0 if has_failed else grace_s)


async def serve(settings: EngineSettings, stop: asyncio.Event, *, security: Security) -> None:
    """Run an engine until `stop` is set, then drain it.

    Raises:
        SetupError: NATS is out of reach, a port is in use, or SGLang does not start.
        UnavailableError: one of SGLang's processes died or hung, or call after call crashed.
    """
    # Ports and the bus are checked before a minute of loading.
    require_free_port(settings.network.host, settings.rollout.port, key="rollout.port")
    if settings.metrics.port is not None:
        require_free_port(settings.network.host, settings.metrics.port, key="metrics.port")
    async with _bucket(settings, security):
        log.debug("bus.reached")
    with scratch_folder() as folder:
        sglang_metrics = None if settings.metrics.port is None else SglangMetrics.keep_in_files(folder / "metrics")
        starting = running(
            settings.rollout,
            settings.model.path,
            network=settings.network,
            grace_s=settings.run.grace_s,
            float32_head=settings.float32_head,
            router_replay=settings.router_replay,
            group_timeout_s=settings.group_timeout_s,
            security=security,
            enable_metrics=sglang_metrics is not None,
        )
        async with starting as server, _measured(settings, server, sglang_metrics, security):
            note_segments(folder)
            ends = (stop, server.engine.died, server.crashes.is_useless)
            async with (
                _reached_again(settings, security, ends) as reached,
                sending_spans(settings.bus, run=settings.run.name, security=security),
            ):
                if reached is not None:
                    with rare_collections():
                        await _announce(server, *reached, settings, ends)
            if server.engine.died.is_set():
                raise _dead(server.engine)
            server.crashes.require_useful()


@asynccontextmanager
async def _bucket(settings: EngineSettings, security: Security) -> AsyncIterator[tuple[Bus, KeyValue]]:
    """Connect to the bus during the context, and find the bucket of leases."""
    async with connect(settings.bus, run=settings.run.name, security=security) as bus:
        yield bus, await bus.bucket("replicas", ttl_s=settings.bus.lease_ttl_s)


@asynccontextmanager
async def _reached_again(
    settings: EngineSettings, security: Security, ends: Collection[asyncio.Event]
) -> AsyncIterator[tuple[Bus, KeyValue] | None]:
    """As `_bucket`, however long NATS is away, since it was there before the load; None if one of `ends` comes first.

    The connection is a second one because SGLang's processes, forked while it loads, would keep the first one open.
    """
    async with AsyncExitStack() as connection:
        reached = None
        while reached is None and not any(end.is_set() for end in ends):
            try:
                async with asyncio.timeout(_TRY_S):
                    reached = await connection.enter_async_context(_bucket(settings, security))
            except (SetupError, TimeoutError) as error:
                log.warning("engine.bus_away", reason=str(error) or "no answer")
                await asyncio.sleep(_RETRY_S)
        yield reached


async def _announce(
    server: EngineServer, bus: Bus, bucket: KeyValue, settings: EngineSettings, ends: Collection[asyncio.Event]
) -> None:
    """Hold the lease until one of `ends` is set and the service has ended."""
    server.images.attach(ImageStore(bus))
    lease_of_server = held(bucket, server.view.replica_id, lambda: _lease(server), ttl_s=settings.bus.lease_ttl_s)
    async with lease_of_server as lease, asyncio.TaskGroup() as tasks:
        keeping = [
            tasks.create_task(lease.renew_on_change(server.changed, is_passing=lambda: _is_passing(server))),
            tasks.create_task(_follow_load(server)),
            tasks.create_task(server.engine.until_it_hangs(is_excused=lambda: server.receiver.is_busy)),
        ]
        await _until_any(ends)
        await server.end_service(settings.run.grace_s)  # while the lease announces it
        for task in keeping:
            task.cancel()


@asynccontextmanager
async def _measured(
    settings: EngineSettings, server: EngineServer, sglang_metrics: SglangMetrics | None, security: Security
) -> AsyncIterator[None]:
    """Serve the engine's metrics and SGLang's during the context, if the recipe wants that."""
    with ExitStack() as sources:
        sources.enter_context(exposed(EngineMetrics(server.view).read))
        if sglang_metrics is not None:
            sources.enter_context(exposed(sglang_metrics.read))
        async with serving_metrics(settings.metrics, settings.run, settings.network, security):
            yield


@asynccontextmanager
async def running(
    config: RolloutConfig,
    model_path: Path,
    *,
    network: NetworkConfig,
    grace_s: float,
    group_timeout_s: float,
    security: Security,
    float32_head: bool = False,
    router_replay: bool = False,
    enable_metrics: bool = False,
) -> AsyncIterator[EngineServer]:
    """Run an engine and its gRPC server during the context, without a lease.

    At the end, running calls may finish within `grace_s` seconds, the rest are handed over, and SGLang's processes end.
    """
    config = disaggregation.with_transfer_backend(config, cuda=settings.has_cuda())
    engine = await SglangEngine.start(
        config,
        model_path,
        network=network,
        float32_head=float32_head,
        router_replay=router_replay,
        group_timeout_s=group_timeout_s,
        enable_metrics=enable_metrics,
    )
    changed = asyncio.Event()
    receiver = WeightReceiver(
        SglangWeights(engine, group_timeout_s=group_timeout_s),
        prepare_deadline_s=group_timeout_s,
        max_deadline_s=MAX_PUSH_S,
        num_ranks=config.tensor_parallel,
        on_change=changed.set,
    )
    # After SGLang's fork: a gRPC server starts threads.
    view = ReplicaView(config, engine, receiver)
    images, crashes = ImageSource(), CrashStreak()
    server = RpcServer(host=network.host, port=config.port, key="rollout.port", security=security)

    async def begin_drain() -> None:
        view.draining = True
        changed.set()
        await server.set_serving(False)

    drain = Drain(engine, begin_drain)
    server.add(
        generate_pb2_grpc.add_GenerateServiceServicer_to_server,
        GenerateServicer(config, engine, receiver, view, images, crashes),
        service_name(generate_pb2.DESCRIPTOR, "GenerateService"),
    )
    server.add(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        RolloutServicer(receiver, view, drain),
        service_name(rollout_pb2.DESCRIPTOR, "RolloutService"),
    )
    try:
        await _open(receiver, engine)
        port = await server.start()
        view.listens(network.advertised, port)
        log.info("engine.serving", replica_id=view.replica_id, address=view.address)
        running_server = EngineServer(engine, receiver, view, drain, images, crashes, changed)
        try:
            yield running_server
        finally:
            await running_server.end_service(grace_s)
            await server.drain(_LAST_WORDS_S)
    finally:
        await receiver.close()
        await engine.shutdown()


async def _open(receiver: WeightReceiver, engine: SglangEngine) -> None:
    """Have the receiver ask for the engine's parameters; SGLang awaits the answer of a process that has died for ever.

    Raises:
        UnavailableError: one of SGLang's processes ended, or does not answer.
    """
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            await unless_stopped(receiver.open(), engine.died)
    except TimeoutError:
        raise UnavailableError(f"the engine did not name its parameters within {_OPEN_TIMEOUT_S:g} s") from None
    if engine.died.is_set():
        raise _dead(engine)


def _dead(engine: SglangEngine) -> UnavailableError:
    return UnavailableError(f"the engine died: {engine.death}; start the engine again")


def _is_passing(server: EngineServer) -> bool:
    """Return whether the engine is in a push that concerns no router: peers of a pair take no calls meanwhile."""
    return server.view.state == common_pb2.REPLICA_STATE_UPDATING and not server.engine.is_disaggregated


async def _follow_load(server: EngineServer) -> None:
    while not server.engine.died.is_set():
        await server.view.refresh()
        await asyncio.sleep(_LOAD_INTERVAL_S)


async def _until_any(events: Iterable[asyncio.Event]) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _lease(server: EngineServer) -> bytes:
    return write_replica(server.view.describe())
