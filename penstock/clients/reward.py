"""Client of the reward service."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any, cast

import grpc.aio

from penstock.clients.base import Client
from penstock.errors import PenstockError
from penstock.rpc.channel import call
from penstock.rpc.status import error_of
from penstock.runtime.security import Security
from penstock.v1 import reward_pb2, reward_pb2_grpc


class RewardClient(Client):
    """The reward service; if its name has several addresses, all of them in turn."""

    _repeats_late_calls = True

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the reward service at `address` (host:port)."""
        super().__init__(address, security=security, spread=True)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def verify(
        self, item: reward_pb2.VerifyItem, *, timeout_s: float, retry_until: float | None = None
    ) -> reward_pb2.Verdict:
        """Verify one response; deadlines and errors are those of `verify_batch`."""
        request = reward_pb2.VerifyRequest(item=item)

        async def attempt(number: int, remaining_s: float) -> reward_pb2.VerifyResponse:
            return await call(self._stub.Verify(request, timeout=remaining_s), peer=f"reward at {self.address}")

        return (await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)).verdict

    async def verify_stream(
        self, items: AsyncIterable[reward_pb2.VerifyItem], *, timeout_s: float | None = None
    ) -> AsyncGenerator[reward_pb2.VerifyStreamResponse, None]:
        """Verify items as they arrive; verdicts come as they are reached, in any order, each with its item's id.

        A refused item (for example with an unknown profile) is answered with an error, and the stream goes on. `items`
        is read only as fast as the service takes them. Leaving the iteration early cancels the rest: use
        `contextlib.aclosing` if that must not wait for the garbage collector.

        Args:
            items: The responses to verify, with distinct item ids.
            timeout_s: Deadline of the whole stream; None: no deadline.

        Raises:
            UnavailableError: the service does not answer or is stopping; unanswered items were not verified.
            DeadlineError: the stream took longer than `timeout_s`.
        """
        calling: Any = cast(Any, self._stub.VerifyStream)(timeout=timeout_s)  # the stubs want an iterator of requests
        has_ended = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the stream, whose reader gets the error

        async def send() -> None:
            try:
                async for item in items:
                    try:
                        await calling.write(reward_pb2.VerifyStreamRequest(item=item))
                    except has_ended:
                        return
                with contextlib.suppress(*has_ended):
                    await calling.done_writing()
            except BaseException:
                calling.cancel()
                raise

        sending = asyncio.create_task(send())
        try:
            while (response := await calling.read()) != grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                yield response
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, peer=f"reward at {self.address}") from None
        except asyncio.CancelledError:
            if sending.done() and not sending.cancelled():
                sending.result()  # raises the error of `items`
            raise
        finally:
            calling.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Verify responses; verdicts are in the order of `items`.

        Args:
            items: The responses to verify.
            timeout_s: Deadline of the first attempt; each attempt after one that exceeded it has twice as long.
            retry_until: Retry a call that may succeed later until this time of `time.monotonic()`; None: never.

        Raises:
            InvalidRequestError: there is no such profile.
            OverloadedError: the service's queue is full.
            UnavailableError: the service does not answer.
            DeadlineError: the last attempt exceeded its deadline.
            PenstockError: the verdicts belong to other items.
        """
        request = reward_pb2.VerifyBatchRequest(items=items)

        async def attempt(number: int, remaining_s: float) -> reward_pb2.VerifyBatchResponse:
            return await call(self._stub.VerifyBatch(request, timeout=remaining_s), peer=f"reward at {self.address}")

        verdicts = list((await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)).verdicts)
        if [verdict.item_id for verdict in verdicts] != [item.item_id for item in items]:
            raise PenstockError(f"reward at {self.address} answered {len(items)} items with verdicts of other items")
        return verdicts

    async def list_profiles(self, *, timeout_s: float = 5.0) -> list[reward_pb2.Profile]:
        """Return the service's profiles, sorted by name."""
        pending = self._stub.ListProfiles(reward_pb2.ListProfilesRequest(), timeout=timeout_s)
        return list((await call(pending, peer=f"reward at {self.address}")).profiles)
