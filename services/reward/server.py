"""The reward service's life, from start to drain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from penstock.errors import SetupError
from penstock.rpc.server import RpcServer, service_name
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.config import RewardConfig
from services.reward.faces.rpc import RewardServicer
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.worker_process import WorkerDiedError
from services.reward.verifier import Verifier


class RewardRecipe(Protocol):
    """The part of a recipe that the reward service reads."""

    @property
    def reward(self) -> RewardConfig:
        """Its own section."""


@contextlib.asynccontextmanager
async def running(config: RewardConfig) -> AsyncIterator[tuple[RpcServer, WorkerPool]]:
    """Run the service for as long as the context lasts; on leaving it, calls in progress may finish within `grace_s`.

    Raises:
        SetupError: the port is in use, or the worker processes do not start.
    """
    pool = WorkerPool(
        num_workers=config.workers,
        memory_limit_bytes=config.memory_limit_mb * 2**20,
        recycle_after=config.recycle_after,
        max_queue=config.max_queue,
    )
    server = RpcServer(host=config.host, port=config.port)
    name = service_name(reward_pb2.DESCRIPTOR, "RewardService")
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, RewardServicer(Verifier(config, pool)), name)
    try:
        try:
            await pool.start()
        except WorkerDiedError as error:
            raise SetupError(
                f"the reward service's worker processes do not start: {error}; is math-verify installed? "
                "pip install 'penstock[reward]'"
            ) from None
        await server.start()
        try:
            yield server, pool
        finally:
            await server.drain(config.grace_s)
    finally:
        await pool.close()


async def serve(recipe: RewardRecipe, stop: asyncio.Event) -> None:
    """Run the reward service until `stop` is set, then drain it."""
    async with running(recipe.reward):
        await stop.wait()
