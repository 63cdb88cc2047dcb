"""The reward service's gRPC face, and its life from start to drain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from penstock.errors import InvalidRequestError, SetupError
from penstock.rpc.server import RpcServer, service_name
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.config import RewardConfig
from services.reward.pool import WorkerPool
from services.reward.verifier import Item, Scored, Verifier
from services.reward.worker_process import WorkerDiedError

Context = grpc.aio.ServicerContext[Any, Any]


class RewardRecipe(Protocol):
    """The part of a recipe that the reward service reads."""

    @property
    def reward(self) -> RewardConfig:
        """Its own section."""


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Translates between the contract and the verifier."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def Verify(self, request: reward_pb2.VerifyRequest, context: Context) -> reward_pb2.VerifyResponse:  # noqa: N802 - the contract's name
        """Judge one response."""
        if not request.HasField("item"):
            raise InvalidRequestError("item is missing")
        (verdict,) = await self._verify([request.item])
        return reward_pb2.VerifyResponse(verdict=verdict)

    async def VerifyBatch(  # noqa: N802 - the contract's name
        self, request: reward_pb2.VerifyBatchRequest, context: Context
    ) -> reward_pb2.VerifyBatchResponse:
        """Judge many responses, in order."""
        return reward_pb2.VerifyBatchResponse(verdicts=await self._verify(request.items))

    async def ListProfiles(  # noqa: N802 - the contract's name
        self, request: reward_pb2.ListProfilesRequest, context: Context
    ) -> reward_pb2.ListProfilesResponse:
        """Tell which profiles there are."""
        profiles = sorted(self._verifier.profiles.values(), key=lambda profile: profile.name)
        return reward_pb2.ListProfilesResponse(
            profiles=[reward_pb2.Profile(name=profile.name, description=profile.description) for profile in profiles]
        )

    async def _verify(self, items: Any) -> list[reward_pb2.Verdict]:
        verdicts = await self._verifier.verify(
            [
                Item(golds=item.golds, response=item.response, profile=item.profile, deadline_s=item.deadline_s)
                for item in items
            ]
        )
        return [_to_proto(item.item_id, verdict) for item, verdict in zip(items, verdicts, strict=True)]


def _to_proto(item_id: str, verdict: Scored) -> reward_pb2.Verdict:
    judgement = verdict.judgement
    return reward_pb2.Verdict(
        item_id=item_id,
        score=verdict.score,
        status=reward_pb2.VerdictStatus.Value(f"VERDICT_STATUS_{judgement.status}"),
        extracted=judgement.extracted,
        method=reward_pb2.VerdictMethod.Value(f"VERDICT_METHOD_{judgement.method}"),
        elapsed_s=verdict.elapsed_s,
    )


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
