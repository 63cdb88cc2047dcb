"""The replicas that are alive, what was published, and a channel to each replica.

Invariant: a replica is listed exactly as long as its lease is; its channel closes when it is gone and the last call on
it has ended.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc.aio
import structlog

from penstock.bus.connection import Bus
from penstock.bus.leases import Watch, watched
from penstock.bus.replica_lease import read_replica
from penstock.rpc.channel import connect
from penstock.v1 import common_pb2
from services.router.policy import Candidate

log = structlog.get_logger()

GENERATE = "/penstock.v1.GenerateService/Generate"

_SET_ASIDE_S = 1.0
_LOOK_AGAIN_S = 0.2  # leases end without an event


@dataclasses.dataclass(slots=True)
class _Member:
    """A replica with its channel."""

    replica: common_pb2.Replica
    lease: bytes
    channel: grpc.aio.Channel
    num_in_flight: int = 0
    set_aside_until: float = 0.0
    gone: bool = False


class Member:
    """A replica while a request is with it."""

    def __init__(self, member: _Member) -> None:
        """Use `Pool.engaged`."""
        self._member = member
        self._generate = member.channel.unary_unary(GENERATE, None, None)  # bytes to bytes: answers are not read

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"replica {self._member.replica.replica_id} at {self._member.replica.address}"

    async def connected(self, timeout_s: float) -> bool:
        """Connect if need be; false when it cannot be reached. After this a failure means that it had the request."""
        channel = self._member.channel
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    state = channel.get_state(try_to_connect=True)
                    if state == grpc.ChannelConnectivity.READY:
                        return True
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        return False
                    await channel.wait_for_state_change(state)
        return False

    def generate(self, request: bytes, *, timeout_s: float) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """Start the call; cancelling it aborts the request in the engine."""
        return self._generate(request, timeout=timeout_s)

    def set_aside(self) -> None:
        """Give it no requests for a moment."""
        self._member.set_aside_until = time.monotonic() + _SET_ASIDE_S


class Pool:
    """What the router knows; it follows the run's buckets `replicas` and `policy`."""

    def __init__(self, replicas: Watch, policy: Watch) -> None:
        """Use `open_pool`."""
        self._replicas = replicas
        self._policy = policy
        self._members: dict[str, _Member] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def candidates(self) -> list[Candidate]:
        """The replicas that hold their lease, by id."""
        self._refresh()
        now = time.monotonic()
        return [
            Candidate(
                replica=member.replica,
                num_in_flight=member.num_in_flight,
                reachable=member.set_aside_until <= now,
            )
            for _, member in sorted(self._members.items())
        ]

    def published(self) -> tuple[int, int]:
        """The policy version published last and the oldest one inside the staleness bound; zeros when none was."""
        value = self._policy.values.get("current")
        if value is None:
            return 0, 0
        try:
            current = json.loads(value)
            return int(current["version"]), int(current["min_version"])
        except (ValueError, KeyError, TypeError) as error:
            log.error("policy.unreadable", value=value[:200], error=repr(error))
            return 0, 0

    async def changed(self, timeout_s: float) -> None:
        """Wait until something is different, or for `timeout_s`."""
        event = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    @contextmanager
    def engaged(self, replica_id: str) -> Iterator[Member]:
        """Count a request with the replica during the context. The id is one that `candidates` gave just now."""
        member = self._members[replica_id]
        member.num_in_flight += 1
        try:
            yield Member(member)
        finally:
            member.num_in_flight -= 1
            self._close_if_unused(member)

    def _refresh(self) -> None:
        """Bring the members in line with the leases."""
        leases = self._replicas.values
        for replica_id in self._members.keys() - leases.keys():
            self._remove(replica_id)
        for replica_id, lease in leases.items():
            member = self._members.get(replica_id)
            if member is not None and member.lease == lease:
                continue
            replica = read_replica(replica_id, lease)
            if replica is None:
                self._remove(replica_id)
            elif member is None or member.replica.address != replica.address:
                self._remove(replica_id)
                self._members[replica_id] = _Member(replica, lease, connect(replica.address))
                log.info("replica.joined", replica=replica_id, address=replica.address)
            else:
                member.replica, member.lease = replica, lease

    def _remove(self, replica_id: str) -> None:
        member = self._members.pop(replica_id, None)
        if member is None:
            return
        member.gone = True
        log.info("replica.left", replica=replica_id, num_in_flight=member.num_in_flight)
        self._close_if_unused(member)

    def _close_if_unused(self, member: _Member) -> None:
        if member.gone and member.num_in_flight == 0:
            task = asyncio.create_task(member.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _follow(self, watch: Watch) -> None:
        while True:
            if await watch.changed(_LOOK_AGAIN_S):
                self._changed.set()
                self._changed = asyncio.Event()
            self._refresh()

    async def _close(self) -> None:
        for replica_id in list(self._members):
            self._remove(replica_id)
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def open_pool(bus: Bus) -> AsyncIterator[Pool]:
    """Follow the run's replicas during the context; on entry all of now are known."""
    ttl_s = bus.config.lease_ttl_s
    replicas, policy = await bus.bucket("replicas", ttl_s=ttl_s), await bus.bucket("policy")
    async with (
        watched(replicas, ttl_s=ttl_s) as replica_watch,
        watched(policy, keys="current") as policy_watch,  # beside it the bucket keeps every version's origin
    ):
        pool = Pool(replica_watch, policy_watch)
        followers = [asyncio.create_task(pool._follow(watch)) for watch in (replica_watch, policy_watch)]
        try:
            yield pool
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            await pool._close()
