"""Prefill and decode engines without a model, for tests of what pairs them: simulated, but they really need each other.

A prefill engine computes nothing, but it keeps a ticket for each room, and serves it over TCP at its bootstrap address;
a decode engine has no token before it has fetched the ticket of its room there, and a prefill engine is not done before
its ticket was fetched. So half a pair waits until `pair_timeout_s` is over, and a wrong one is noticed: the ticket says
who made it and of which prompt. In a process of its own, to be killed: `python -m tests.simulated_pair --url=nats://...
--run=NAME --replica-id=ID --role=prefill|decode`; it prints its address once it serves.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Self

from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig, LogConfig
from penstock.errors import InvalidRequestError, NotReadyError, UnavailableError
from penstock.telemetry import log
from penstock.v1 import common_pb2, generate_pb2
from tests.simulated_engine import SimulatedEngine


class SimulatedHalf(SimulatedEngine):
    """What both roles have in common; see `SimulatedEngine`."""

    def __init__(
        self,
        bus: Bus,
        *,
        role: int,
        backend: str = "simulated",
        tensor_parallel: int = 1,
        pair_timeout_s: float = 2.0,
        max_tokens: int = 0,
        **settings: Any,
    ) -> None:
        """One that gives up after `pair_timeout_s` without its partner."""
        super().__init__(bus, **settings)
        self.replica.role = role
        self.replica.max_tokens = max_tokens
        self.replica.disaggregation.transfer_backend = backend
        self.replica.disaggregation.tensor_parallel = tensor_parallel
        self.pair_timeout_s = pair_timeout_s
        self.rooms: list[int] = []
        """Of all requests that came so far."""
        self.num_timed_out = 0
        """Requests whose other half did not come."""
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def begin_push(self) -> None:
        """As real halves do: what runs is broken off, what comes waits."""
        self._resumed.clear()
        self._handing_over = True
        await self.update(state=common_pb2.REPLICA_STATE_UPDATING)

    async def end_push(self, version: int) -> None:
        """The new version is here; what waited goes on."""
        self._handing_over = False
        self._resumed.set()
        await self.update(state=common_pb2.REPLICA_STATE_READY, policy_version=version)

    async def _delay(self, request: generate_pb2.GenerateRequest) -> None:
        if not request.HasField("bootstrap"):
            raise InvalidRequestError("bootstrap is missing: this engine is half of a pair")
        if self.replica.max_tokens and len(request.input_ids) >= self.replica.max_tokens:
            raise InvalidRequestError(f"the prompt has {len(request.input_ids)} tokens; {self.replica.max_tokens} fit")
        assert request.bootstrap.room not in self.rooms, "a room is never used twice"
        self.rooms.append(request.bootstrap.room)
        await self._resumed.wait()
        if request.bootstrap.policy_version != self.replica.policy_version:
            raise NotReadyError(
                f"bootstrap.policy_version = {request.bootstrap.policy_version}, and this engine has "
                f"{self.replica.policy_version}"
            )
        await super()._delay(request)

    def _ticket(self, request: generate_pb2.GenerateRequest) -> dict[str, Any]:
        """What both halves of one request must agree on."""
        kept = self.replica.disaggregation
        digest = hashlib.sha256(str((list(request.input_ids), request.request_id)).encode()).hexdigest()
        return {
            "room": request.bootstrap.room,
            "version": self.replica.policy_version,
            "backend": kept.transfer_backend,
            "tensor_parallel": kept.tensor_parallel,
            "request": digest,
        }


class SimulatedPrefill(SimulatedHalf):
    """Answers when its ticket was fetched; `delay_s` is what it takes before it can be."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        """See `SimulatedHalf`."""
        super().__init__(bus, role=common_pb2.REPLICA_ROLE_PREFILL, **settings)
        self._tickets: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._fetched: dict[int, asyncio.Event] = {}
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._serves_tickets = False

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Make the ticket, wait until it was fetched, answer with the first token."""
        room = request.bootstrap.room
        with self._counted(request, context):
            try:
                await self._delay(request)
                fetched = self._fetched.setdefault(room, asyncio.Event())
                self._ticket_of(room).set_result(self._ticket(request))
                async with asyncio.timeout(self.pair_timeout_s):
                    while not fetched.is_set():
                        if self._handing_over:
                            raise UnavailableError("a push broke it off")
                        await asyncio.sleep(0.005)
            except TimeoutError:
                self.num_timed_out += 1
                raise UnavailableError(f"nobody came for room {room} within {self.pair_timeout_s} s") from None
            finally:
                if room in self._tickets:
                    self._tickets.pop(room).cancel()  # who waits for it hears so
                self._fetched.pop(room, None)
            self.num_answered += 1
            answer = self._answer(request)
            return generate_pb2.GenerateResponse(
                output_ids=answer.output_ids[:1],
                logprobs=answer.logprobs[:1],
                version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=self.replica.policy_version)],
                finish_reason=generate_pb2.FINISH_REASON_LENGTH,
                replica_id=self.replica_id,
            )

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """It has no streams."""
        raise InvalidRequestError("a prefill engine answers Generate only")
        yield

    def _ticket_of(self, room: int) -> asyncio.Future[dict[str, Any]]:
        return self._tickets.setdefault(room, asyncio.get_running_loop().create_future())

    async def _serve_ticket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._connections[writer] = serving
        try:
            if not self._serves_tickets or not (line := await reader.readline()):
                return  # it comes too late, or who asked has left
            room = int(line)
            ticket = self._ticket_of(room)
            await asyncio.wait((ticket,))
            if not ticket.cancelled():
                writer.write(json.dumps(ticket.result()).encode() + b"\n")
                await writer.drain()
                if room in self._fetched:
                    self._fetched[room].set()
        except ConnectionError:
            return
        finally:
            self._connections.pop(writer)
            writer.close()

    def drop_tickets(self) -> None:
        """Break off all transfers, as a crash does."""
        for writer in self._connections:
            writer.transport.abort()

    async def stop_serving(self) -> None:
        """Drop the port for tickets too, and who waits there."""
        await super().stop_serving()
        self.drop_tickets()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve tickets as well."""
        self._serves_tickets = True
        tickets = await asyncio.start_server(self._serve_ticket, "127.0.0.1", 0)
        self.replica.disaggregation.bootstrap_host = "127.0.0.1"
        self.replica.disaggregation.bootstrap_port = tickets.sockets[0].getsockname()[1]
        try:
            async with super().running():
                yield self
        finally:
            self._serves_tickets = False
            tickets.close()
            for waiting in self._tickets.values():
                waiting.cancel()
            left = tuple(self._connections.values())
            for serving in left:
                serving.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class SimulatedDecode(SimulatedHalf):
    """Streams when it has fetched the ticket of its room."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        """See `SimulatedHalf`."""
        super().__init__(bus, role=common_pb2.REPLICA_ROLE_DECODE, **settings)
        self.num_mismatched = 0
        """Tickets that were not for this engine, or of another request."""

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Nobody should ask for it."""
        raise InvalidRequestError("a decode engine is asked for streams here")

    async def _delay(self, request: generate_pb2.GenerateRequest) -> None:
        await super()._delay(request)
        bootstrap = request.bootstrap
        try:
            async with asyncio.timeout(self.pair_timeout_s):
                reader, writer = await asyncio.open_connection(bootstrap.host, bootstrap.port)
                try:
                    writer.write(f"{bootstrap.room}\n".encode())
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            self.num_timed_out += 1
            raise UnavailableError(f"nobody brought room {bootstrap.room} within {self.pair_timeout_s} s") from None
        except OSError as error:
            raise UnavailableError(f"the transfer of room {bootstrap.room} failed: {error}") from None
        if not line:
            raise UnavailableError(f"the transfer of room {bootstrap.room} was broken off")
        if json.loads(line) != self._ticket(request):
            self.num_mismatched += 1
            raise InvalidRequestError(f"{line!r} is not for {self._ticket(request)}")


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--lease-ttl-s", type=float, default=1.0)
    options = parser.parse_args()
    log.configure(LogConfig(), service="simulated-pair")
    async with connect(BusConfig(url=options.url, lease_ttl_s=options.lease_ttl_s), run=options.run) as bus:
        kind = {"prefill": SimulatedPrefill, "decode": SimulatedDecode}[options.role]
        engine = kind(bus, replica_id=options.replica_id, delay_s=options.delay_s, token_s=options.token_s)
        async with engine.running():
            sys.stdout.write(f"{engine.replica.address}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
