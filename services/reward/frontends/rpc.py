"""The gRPC frontend: `penstock.v1.RewardService` over the verifier."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError, UnavailableError
from penstock.telemetry import spans
from penstock.v1 import reward_pb2, reward_pb2_grpc
from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.verdict import Method
from services.reward.verifier import Scored, Verifier

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_IN_FLIGHT = 256
"""Maximum items of one stream that were read but not answered; at this number the stream stops reading."""
_STATUS = {status: reward_pb2.VerdictStatus.Value(f"VERDICT_STATUS_{status}") for status in Status}
_METHOD = {method: reward_pb2.VerdictMethod.Value(f"VERDICT_METHOD_{method}") for method in Method}


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Converts requests to items, and verdicts to responses."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._stopping = asyncio.Event()

    def end_streams(self) -> None:
        """Stop streams from reading; each ends when all items that it has read are answered."""
        self._stopping.set()

    async def Verify(self, request: reward_pb2.VerifyRequest, context: Context) -> reward_pb2.VerifyResponse:  # noqa: N802 - the contract's name
        """Verify one response."""
        if not request.HasField("item"):
            raise InvalidRequestError("item is missing")
        (verdict,) = await self._verify([request.item], context)
        return reward_pb2.VerifyResponse(verdict=verdict)

    async def VerifyBatch(  # noqa: N802 - the contract's name
        self, request: reward_pb2.VerifyBatchRequest, context: Context
    ) -> reward_pb2.VerifyBatchResponse:
        """Verify many responses, in order."""
        return reward_pb2.VerifyBatchResponse(verdicts=await self._verify(request.items, context))

    async def VerifyStream(  # type: ignore[override]  # noqa: N802 - writes by itself: verdicts come from many tasks
        self, request_iterator: AsyncIterator[reward_pb2.VerifyStreamRequest], context: Context
    ) -> None:
        """Verify responses as they arrive, many at a time."""
        slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        writing = asyncio.Lock()

        async def answer(request: reward_pb2.VerifyStreamRequest) -> None:
            try:
                response = await self._answer(request, context)
                async with writing:
                    await context.write(response)
            finally:
                slots.release()

        async def read(group: asyncio.TaskGroup) -> None:
            async for request in request_iterator:
                await slots.acquire()
                group.create_task(answer(request))

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read(group))
            stopping = group.create_task(self._stopping.wait())
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            is_cut_short = reading.cancel()
        if is_cut_short:
            raise UnavailableError("the service is stopping; send the items without a verdict again")

    async def ListProfiles(  # noqa: N802 - the contract's name
        self, request: reward_pb2.ListProfilesRequest, context: Context
    ) -> reward_pb2.ListProfilesResponse:
        """List the profiles."""
        profiles = sorted(self._verifier.profiles.values(), key=lambda profile: profile.name)
        return reward_pb2.ListProfilesResponse(
            profiles=[reward_pb2.Profile(name=profile.name, description=profile.description) for profile in profiles]
        )

    async def _verify(self, items: Iterable[reward_pb2.VerifyItem], context: Context) -> list[reward_pb2.Verdict]:
        items = list(items)
        with spans.recorded("judged", item=items[0].item_id if items else None, num_items=len(items)):
            verdicts = await self._verifier.verify(
                [_from_proto(item) for item in items], within_s=context.time_remaining()
            )
        return [_to_proto(item.item_id, verdict) for item, verdict in zip(items, verdicts, strict=True)]

    async def _answer(
        self, request: reward_pb2.VerifyStreamRequest, context: Context
    ) -> reward_pb2.VerifyStreamResponse:
        item_id = request.item.item_id
        try:
            if not request.HasField("item"):
                raise InvalidRequestError("item is missing")
            item = _from_proto(request.item)
            (verdict,) = await self._verifier.verify_when_free([item], within_s=context.time_remaining())
        except InvalidRequestError as error:
            refusal = reward_pb2.VerifyError(item_id=item_id, message=str(error))
            return reward_pb2.VerifyStreamResponse(error=refusal)
        return reward_pb2.VerifyStreamResponse(verdict=_to_proto(item_id, verdict))


def _from_proto(item: reward_pb2.VerifyItem) -> Item:
    return Item(
        golds=tuple(item.golds),
        response=item.response,
        profile=item.profile,
        prompt=item.prompt,
        deadline_s=item.deadline_s,
    )


def _to_proto(item_id: str, verdict: Scored) -> reward_pb2.Verdict:
    finding = verdict.finding
    return reward_pb2.Verdict(
        item_id=item_id,
        score=verdict.score,
        status=_STATUS[finding.status],
        extracted=finding.extracted,
        method=_METHOD[finding.method],
        elapsed_s=verdict.elapsed_s,
    )
