"""The reward service's life, from start to drain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import NamedTuple

from penstock.errors import ConfigError, InvalidRequestError, SetupError
from penstock.http.server import HttpServer
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.isolation.forkserver_process import WorkerDiedError
from penstock.runtime.security import Security
from penstock.telemetry.metrics import exposed
from penstock.telemetry.serving import serving_metrics
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.admission_queue import MAX_ITEMS
from services.reward.config import RewardConfig, RewardSettings
from services.reward.frontends.http.app import make_http_app
from services.reward.frontends.rpc import RewardServicer
from services.reward.isolation.pool import WorkerPool
from services.reward.malloc_trim import trim_when_idle
from services.reward.profiles.custom import find_verifiers
from services.reward.verifier import Verifier

MAX_OVERTIME = 8
"""Maximum items in overtime: a batch with a few hostile items can go on, and they do not fill the cores."""
OVERTIME_MEMORY_BYTES = 192 * 2**20
"""Memory that worker processes may allocate together, if memory_limit_mb is not more; beyond it, the largest item is
answered with OUT_OF_MEMORY. It bounds the total of hostile items in a container."""
_MAX_CONNECTION_AGE_S = 60.0
"""Callers connect anew after this long, and then also call services that were added meanwhile."""


class RunningService(NamedTuple):
    """The parts of a reward service."""

    rpc: RpcServer
    pool: WorkerPool
    http: HttpServer


@contextlib.asynccontextmanager
async def running(
    config: RewardConfig,
    *,
    host: str = "127.0.0.1",
    grace_s: float = 5.0,
    security: Security | None = None,
    max_overtime: int = MAX_OVERTIME,
    max_items: int = MAX_ITEMS,
) -> AsyncIterator[RunningService]:
    """Run the service during the context; on leaving it, calls in progress may finish within `grace_s`.

    Args:
        config: The settings.
        host: Address to listen on.
        grace_s: Seconds that calls in progress get at the end.
        security: Credentials that callers must show; None: from the environment.
        max_overtime: Slow items that may give up their worker's turn to others, at once.
        max_items: Items in the service at once.

    Raises:
        ConfigError: a setting names an unknown profile, or is wrong for it.
        SetupError: a port is in use, or the worker processes or a custom verifier do not start.
    """
    security = security or Security.from_environment()
    verifiers = find_verifiers(config.verifiers)
    memory_limit_bytes = config.memory_limit_mb * 2**20
    pool = WorkerPool(
        num_workers=config.workers,
        memory_limit_bytes=memory_limit_bytes,
        recycle_after=config.recycle_after,
        max_overtime=max_overtime,
        overtime_memory_bytes=max(OVERTIME_MEMORY_BYTES, memory_limit_bytes),
        sandbox=config.sandbox,
        verifiers=verifiers,
    )
    verifier = Verifier(config, pool, verifiers, tls=security.tls, max_items=max_items)
    servicer = RewardServicer(verifier)
    rpc = RpcServer(
        host=host, port=config.port, key="reward.port", security=security, max_connection_age_s=_MAX_CONNECTION_AGE_S
    )
    name = service_name(reward_pb2.DESCRIPTOR, "RewardService")
    rpc.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, name)
    try:
        app = make_http_app(verifier, config)
    except InvalidRequestError as error:
        raise ConfigError(f"reward.http_profile: {error}") from None
    http = HttpServer(
        app,
        host=host,
        port=config.http_port,
        key="reward.http_port",
        max_body_bytes=config.http_max_body_mb * 2**20,
        security=security,
    )
    trimming = asyncio.create_task(trim_when_idle(verifier.queue))
    try:
        try:
            await pool.start()
        except (WorkerDiedError, OSError) as error:
            hint = "" if find_spec("math_verify") else "; install math-verify: pip install 'penstock[reward]'"
            raise SetupError(f"the reward service's worker processes do not start: {error}{hint}") from None
        await rpc.start()
        try:
            await http.start()
            with exposed(verifier.metrics.read):
                yield RunningService(rpc, pool, http)
        finally:
            http.set_serving(False)
            await rpc.set_serving(False)
            servicer.end_streams()
            await asyncio.gather(rpc.drain(grace_s), http.drain(grace_s))
    finally:
        trimming.cancel()
        await verifier.close()
        await pool.close()


async def serve(settings: RewardSettings, stop: asyncio.Event, *, security: Security) -> None:
    """Run the reward service until `stop` is set, then drain it."""
    async with (
        running(settings.reward, host=settings.network.host, grace_s=settings.run.grace_s, security=security),
        serving_metrics(settings.metrics, settings.run, settings.network, security),
    ):
        await stop.wait()
