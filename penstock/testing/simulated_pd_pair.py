"""Prefill and decode engines without a model that really need each other.

A prefill engine computes nothing, but it keeps a pass for each room, and serves it over TCP at its bootstrap address. A
decode engine has no tokens until it has fetched its room's pass there, and a prefill engine is not done until its pass
was fetched. So a peer without its partner waits for `pair_timeout_s`, and a wrong partner is noticed: the pass names
its maker and the prompt.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, Self

from penstock.bus.connection import Bus
from penstock.errors import InvalidRequestError, NotReadyError, UnavailableError
from penstock.testing.answers import first_token
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, generate_pb2


class SimulatedPeer(SimulatedEngine):
    """The common part of both roles; see `SimulatedEngine`."""

    def __init__(
        self,
        bus: Bus,
        *,
        role: common_pb2.ReplicaRole.ValueType,
        backend: str = "simulated",
        tensor_parallel: int = 1,
        pair_timeout_s: float = 60.0,
        max_tokens: int = 0,
        **settings: Any,
    ) -> None:
        """Prepare an engine that gives up after `pair_timeout_s` without its peer."""
        super().__init__(bus, **settings)
        self.replica.role = role
        self.replica.max_tokens = max_tokens
        self.replica.disaggregation.transfer_backend = backend
        self.replica.disaggregation.tensor_parallel = tensor_parallel
        self.pair_timeout_s = pair_timeout_s
        self.rooms: list[int] = []
        """Rooms of all requests so far."""
        self.num_timed_out = 0
        """Number of requests whose peer did not come."""
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def begin_push(self) -> None:
        """Interrupt running calls and let new ones wait, as real peers do."""
        self._resumed.clear()
        self._handing_over = True
        await self.update(state=common_pb2.REPLICA_STATE_UPDATING)

    async def end_push(self, version: int) -> None:
        """Take the new version and let waiting calls continue."""
        self._handing_over = False
        self._resumed.set()
        await self.update(state=common_pb2.REPLICA_STATE_READY, policy_version=version)

    async def _delay(self, request: generate_pb2.GenerateRequest) -> None:
        if not request.HasField("bootstrap"):
            raise InvalidRequestError("bootstrap is missing: this engine needs a peer")
        if request.prompt_logprobs:
            raise InvalidRequestError("prompt_logprobs is set, but this engine is a peer of a PD pair; leave it out")
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

    def _pass_for(self, request: generate_pb2.GenerateRequest) -> dict[str, Any]:
        """Return the facts on which both peers of a request must agree."""
        kept = self.replica.disaggregation
        digest = hashlib.sha256(str((list(request.input_ids), request.request_id)).encode()).hexdigest()
        return {
            "room": request.bootstrap.room,
            "version": self.replica.policy_version,
            "backend": kept.transfer_backend,
            "tensor_parallel": kept.tensor_parallel,
            "request": digest,
        }


class SimulatedPrefill(SimulatedPeer):
    """Answers once its pass was fetched, which is possible after `delay_s`."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        """Prepare a prefill engine; see `SimulatedPeer`."""
        super().__init__(bus, role=common_pb2.REPLICA_ROLE_PREFILL, **settings)
        self._passes: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._fetched: dict[int, asyncio.Event] = {}
        self._transfers: set[asyncio.Task[None]] = set()

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Make the pass, wait until it was fetched, answer with the first token."""
        room = request.bootstrap.room
        with self._counted(request, context):
            try:
                await self._delay(request)
                fetched = self._fetched.setdefault(room, asyncio.Event())
                self._pass_of(room).set_result(self._pass_for(request))
                async with asyncio.timeout(self.pair_timeout_s):
                    while not fetched.is_set():
                        if self._handing_over:
                            raise UnavailableError("a push broke it off")
                        await asyncio.sleep(0.005)
            except TimeoutError:
                self.num_timed_out += 1
                raise UnavailableError(f"no peer fetched room {room} within {self.pair_timeout_s} s") from None
            finally:
                if room in self._passes:
                    self._passes.pop(room).cancel()  # cancels the calls that wait for it
                self._fetched.pop(room, None)
            self.num_answered += 1
            return first_token(self.answer(request, self.replica))

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Refuse: a prefill engine has no streams."""
        raise InvalidRequestError("a prefill engine answers Generate only")
        yield  # type: ignore[unreachable]  # makes this a generator, as the engine's own is

    def _pass_of(self, room: int) -> asyncio.Future[dict[str, Any]]:
        return self._passes.setdefault(room, asyncio.get_running_loop().create_future())

    def _accept(self, listener: socket.socket) -> None:
        """Serve a connection in its own task, whose end closes it, even if it is cancelled before it begins."""
        connection, _ = listener.accept()
        connection.setblocking(False)
        serving = asyncio.get_running_loop().create_task(self._serve_pass(connection))
        self._transfers.add(serving)
        serving.add_done_callback(self._transfers.discard)
        serving.add_done_callback(lambda _: connection.close())

    async def _serve_pass(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            line = b""
            while not line.endswith(b"\n"):
                if not (received := await loop.sock_recv(connection, 64)):
                    return  # the peer is gone
                line += received
            room = int(line)
            room_pass = self._pass_of(room)
            await asyncio.wait((room_pass,))
            if not room_pass.cancelled():
                await loop.sock_sendall(connection, json.dumps(room_pass.result()).encode() + b"\n")
                if room in self._fetched:
                    self._fetched[room].set()

    def drop_passes(self) -> None:
        """Abort all transfers, as a crash does."""
        for serving in self._transfers:
            serving.cancel()

    async def stop_serving(self) -> None:
        """Abort the transfers too."""
        await super().stop_serving()
        self.drop_passes()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve passes as well."""
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self.replica.disaggregation.bootstrap_host = "127.0.0.1"
            self.replica.disaggregation.bootstrap_port = listener.getsockname()[1]
            # asyncio's own server leaks a connection that it accepts while it is closed.
            loop.add_reader(listener, self._accept, listener)
            try:
                async with super().running():
                    yield self
            finally:
                loop.remove_reader(listener)
                for waiting in self._passes.values():
                    waiting.cancel()
                self.drop_passes()
                await asyncio.gather(*self._transfers, return_exceptions=True)


class SimulatedDecode(SimulatedPeer):
    """Streams once it has fetched its room's pass."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        """Prepare a decode engine; see `SimulatedPeer`."""
        super().__init__(bus, role=common_pb2.REPLICA_ROLE_DECODE, **settings)
        self.num_mismatched = 0
        """Number of passes that were for another engine or request."""

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Refuse: this decode engine only streams."""
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
            raise UnavailableError(f"no peer brought room {bootstrap.room} within {self.pair_timeout_s} s") from None
        except OSError as error:
            raise UnavailableError(f"the transfer of room {bootstrap.room} failed: {error}") from None
        if not line:
            raise UnavailableError(f"the transfer of room {bootstrap.room} was broken off")
        if self._handing_over or bootstrap.policy_version != self.replica.policy_version:
            raise NotReadyError("a push came while this call waited for its pass")
        if json.loads(line) != self._pass_for(request):
            self.num_mismatched += 1
            raise InvalidRequestError(f"{line!r} is not for {self._pass_for(request)}")
