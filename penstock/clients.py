"""Typed clients of the services, for services and users alike; they need neither torch nor a recipe.

Every call has a deadline. A failed call raises the error of `penstock.errors` that says why and names the server.
Cancelling the task that waits for a call cancels the call at the server.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, cast

import grpc.aio
import structlog

from penstock.errors import NotReadyError, OverloadedError, PenstockError, UnavailableError
from penstock.rpc.channel import call, connect, stream
from penstock.rpc.status import error_of
from penstock.security import Security
from penstock.v1 import (
    generate_pb2,
    generate_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

log = structlog.get_logger()

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MIN_ATTEMPT_S = 0.05

ResultT = TypeVar("ResultT")


class Client:
    """A channel to one server; use it as a context manager, or `close` it."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to `address` (host:port); it connects at the first call and reconnects by itself.

        Args:
            address: The server.
            security: Token and TLS; None: what this process's say, in a script the token in PENSTOCK_TOKEN.
        """
        self.address = address
        self._channel = connect(address, security)
        self._failing = False

    async def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the channel."""
        await self.close()

    async def _retried(
        self, attempt: Callable[[int, float], Awaitable[ResultT]], *, timeout_s: float, retry_until: float | None
    ) -> ResultT:
        """Call `attempt(number, timeout_s)` until it succeeds, fails for good, or `retry_until` (monotonic) comes.

        What may succeed later is tried again: UnavailableError, OverloadedError and NotReadyError. Waits grow from
        0.1 to 2 seconds, each drawn between half of it and all of it: callers that failed together come back apart.
        """
        number, backoff_s = 0, _FIRST_BACKOFF_S
        while True:
            remaining_s = timeout_s if retry_until is None else min(timeout_s, retry_until - time.monotonic())
            try:
                result = await attempt(number, max(_MIN_ATTEMPT_S, remaining_s))
            except (UnavailableError, OverloadedError, NotReadyError) as error:
                wait_s = backoff_s * random.uniform(0.5, 1.0)
                if retry_until is None or time.monotonic() + wait_s >= retry_until:
                    raise
                self._tell_failing(error)
                await asyncio.sleep(wait_s)
                number, backoff_s = number + 1, min(_MAX_BACKOFF_S, 2 * backoff_s)
            else:
                self._failing = False
                return result

    def _tell_failing(self, error: PenstockError) -> None:
        """One warning when a server stops answering, not one for each of a thousand calls."""
        level = log.debug if self._failing else log.warning
        level("call.retried", address=self.address, reason=str(error))
        self._failing = True


class GenerateClient(Client):
    """Generation, by a router or by an engine directly."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router or engine at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)

    async def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float, retry_until: float | None = None
    ) -> generate_pb2.GenerateResponse:
        """Play one turn.

        Args:
            request: The turn. A retry carries the same request under a request id of its own.
            timeout_s: Deadline of one attempt.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is tried again.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: nobody could take it.
            NotReadyError: the engine is older than the request's min_policy_version.
            DeadlineError: an attempt ran into its deadline.
        """

        async def attempt(number: int, remaining_s: float) -> generate_pb2.GenerateResponse:
            tried = request
            if number > 0:
                tried = generate_pb2.GenerateRequest()
                tried.CopyFrom(request)
                tried.request_id = f"{request.request_id}#{number}"
            return await call(self._stub.Generate(tried, timeout=remaining_s), peer=f"generate at {self.address}")

        return await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """Play one turn and yield its tokens as they come; the last chunk has a finish reason.

        Nothing is tried again: chunks that were yielded stay good, and `penstock.continuation` plays what is left.
        Leaving the iteration early cancels the call: use `contextlib.aclosing` where that should not wait for the
        garbage collector.

        Args:
            request: The turn.
            timeout_s: Deadline of the whole stream.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: nobody could take it, or whoever did could not bring it to its end.
            NotReadyError: the engine is older than the request's min_policy_version.
            OverloadedError: the queue is full.
            DeadlineError: the stream ran into its deadline.
        """
        peer = f"generate at {self.address}"
        is_finished = False
        async with aclosing(stream(self._stub.GenerateStream(request, timeout=timeout_s), peer=peer)) as chunks:
            async for chunk in chunks:
                is_finished = chunk.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
                yield chunk
        if not is_finished:
            raise PenstockError(f"{peer}: the stream of request {request.request_id!r} ended without a finish reason")


class RewardClient(Client):
    """The reward service."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the reward service at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def verify(
        self, item: reward_pb2.VerifyItem, *, timeout_s: float, retry_until: float | None = None
    ) -> reward_pb2.Verdict:
        """Judge one response.

        Args:
            item: The response to judge.
            timeout_s: Deadline of one attempt.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is tried again.

        Raises:
            InvalidRequestError: there is no such profile.
            OverloadedError: the service's queue is full.
            UnavailableError: nobody answers.
        """
        request = reward_pb2.VerifyRequest(item=item)

        async def attempt(number: int, remaining_s: float) -> reward_pb2.VerifyResponse:
            return await call(self._stub.Verify(request, timeout=remaining_s), peer=f"reward at {self.address}")

        return (await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)).verdict

    async def verify_stream(
        self, items: AsyncIterable[reward_pb2.VerifyItem], *, timeout_s: float | None = None
    ) -> AsyncGenerator[reward_pb2.VerifyStreamResponse, None]:
        """Judge items as they come; answers come as they are reached, in any order, each with its item's id.

        An item that cannot be taken (its profile is unknown) is answered with an error and the stream goes on. `items`
        is read only as fast as the service takes them. Leaving the iteration early cancels what still runs: use
        `contextlib.aclosing` where that should not wait for the garbage collector.

        Args:
            items: The responses to judge, with different item ids.
            timeout_s: Deadline of the whole stream; none if None.

        Raises:
            UnavailableError: nobody answers, or the service is stopping: items without an answer were not judged.
            DeadlineError: the stream ran into its deadline.
        """
        calling: Any = cast(Any, self._stub.VerifyStream)(timeout=timeout_s)  # the stubs want an iterator of requests

        async def send() -> None:
            try:
                async for item in items:
                    await calling.write(reward_pb2.VerifyStreamRequest(item=item))
                await calling.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the stream has ended, and whoever reads it hears why
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
                sending.result()  # raises what `items` raised
            raise
        finally:
            calling.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Judge `items`; verdicts come in their order.

        Args:
            items: The responses to judge.
            timeout_s: Deadline of one attempt.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is tried again.

        Raises:
            InvalidRequestError: there is no such profile.
            OverloadedError: the service's queue is full.
            UnavailableError: nobody answers.
            PenstockError: the verdicts are not those of the items.
        """
        request = reward_pb2.VerifyBatchRequest(items=items)

        async def attempt(number: int, remaining_s: float) -> reward_pb2.VerifyBatchResponse:
            return await call(self._stub.VerifyBatch(request, timeout=remaining_s), peer=f"reward at {self.address}")

        verdicts = list((await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)).verdicts)
        if [verdict.item_id for verdict in verdicts] != [item.item_id for item in items]:
            raise PenstockError(f"reward at {self.address} answered {len(items)} items with other verdicts than theirs")
        return verdicts

    async def list_profiles(self, *, timeout_s: float = 5.0) -> list[reward_pb2.Profile]:
        """The profiles that the service has, by name."""
        pending = self._stub.ListProfiles(reward_pb2.ListProfilesRequest(), timeout=timeout_s)
        return list((await call(pending, peer=f"reward at {self.address}")).profiles)


class RouterClient(Client):
    """The router's own side: which replicas there are, places with them, and draining."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def list_replicas(self, *, timeout_s: float = 5.0) -> router_pb2.ListReplicasResponse:
        """The pool, and the versions that bound it."""
        pending = self._stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=timeout_s)
        return await call(pending, peer=f"router at {self.address}")

    async def drain_replica(
        self, replica_id: str, *, grace_s: float, timeout_s: float
    ) -> router_pb2.RouterServiceDrainReplicaResponse:
        """Let the replica take nothing new, and wait until nothing runs there any more.

        Args:
            replica_id: The replica.
            grace_s: How long running requests may take to finish before others take them over.
            timeout_s: Deadline of the call; more than `grace_s`.

        Raises:
            InvalidRequestError: no such replica holds a lease.
            UnavailableError: the router or the replica does not answer.
        """
        request = router_pb2.RouterServiceDrainReplicaRequest(replica_id=replica_id, grace_s=grace_s)
        pending = self._stub.DrainReplica(request, timeout=timeout_s)
        return await call(pending, peer=f"router at {self.address}")


class TrainerClient(Client):
    """The trainer's face."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the trainer at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def get_run(self, *, timeout_s: float = 5.0) -> trainer_pb2.GetRunResponse:
        """Where the run stands."""
        pending = self._stub.GetRun(trainer_pb2.GetRunRequest(), timeout=timeout_s)
        return await call(pending, peer=f"trainer at {self.address}")
