"""The gRPC face: translates between the contract and the verifier."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.item import Item
from services.reward.verifier import Scored, Verifier

Context = grpc.aio.ServicerContext[Any, Any]


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

    async def VerifyStream(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[reward_pb2.VerifyStreamRequest], context: Context
    ) -> AsyncIterator[reward_pb2.VerifyStreamResponse]:
        """Judge responses as they come."""
        async for request in request_iterator:
            (verdict,) = await self._verify([request.item])
            yield reward_pb2.VerifyStreamResponse(verdict=verdict)

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
                Item(
                    golds=item.golds,
                    response=item.response,
                    profile=item.profile,
                    prompt=item.prompt,
                    deadline_s=item.deadline_s,
                )
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
