"""The replicas that are alive, what was published, and a channel to each replica.

Invariant: a replica is listed exactly as long as its lease is; its channel closes when it is gone and the last call on
it has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import structlog

from penstock.bus.connection import Bus
from penstock.bus.leases import Watch, watched
from penstock.bus.replica_lease import read_replica
from penstock.clients.pd_pair import PDPeer
from penstock.errors import CorruptMessageError
from penstock.records.published_version import CURRENT_KEY, POLICY_BUCKET, read_published_version
from penstock.rpc.channel import connect
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import MISMATCHES, ReplicaStatus, pair_up, sizes
from services.router.breaker import Breaker
from services.router.config import RouterConfig
from services.router.limits import Limit

log = structlog.get_logger()

GENERATE = "/penstock.v1.GenerateService/Generate"
GENERATE_STREAM = "/penstock.v1.GenerateService/GenerateStream"

_LOOK_AGAIN_S = 0.2  # leases end, and breakers open, without an event


class Member:
    """A replica with its channel."""

    def __init__(self, candidate: ReplicaStatus, lease: bytes, security: Security) -> None:
        """Prepare the channel; it connects when first used."""
        self.candidate = candidate
        self.lease = lease
        self.is_gone = False
        self.name = f"replica {candidate.replica_id} at {candidate.replica.address}"
        """What it is called in messages."""
        self.channel = connect(candidate.replica.address, security)
        self._unary = self.channel.unary_unary(GENERATE, None, None)  # bytes to bytes
        self._stream = self.channel.unary_stream(GENERATE_STREAM, None, None)
        self.half = PDPeer(name=self.name, channel=self.channel)
        """As a half of a pair."""

    def generate(self, request: bytes, *, timeout_s: float) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """Start the unary call; cancelling it aborts the request in the engine."""
        return self._unary(request, timeout=timeout_s)

    def generate_stream(self, request: bytes, *, timeout_s: float) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        """The same, streaming."""
        return self._stream(request, timeout=timeout_s)


class Pool:
    """What the router knows; it follows the run's buckets `replicas` and `policy`."""

    def __init__(self, config: RouterConfig, replicas: Watch, policy: Watch, security: Security) -> None:
        """Use `open_pool`."""
        self.security = security
        """What calls of replicas show."""
        self.candidates: dict[str, ReplicaStatus] = {}
        """The replicas that hold their lease, by id: one dict, kept up to date."""
        self.published_version = 0
        """The policy version published last; 0 when none was."""
        self.min_version = 0
        """The oldest policy version inside the staleness bound."""
        self.sizes: list[int] = []
        """The different `max_tokens` of the replicas that tell theirs, the smallest first."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when anything may be different, and every so often."""
        self._config = config
        self._replicas = replicas
        self._policy = policy
        self._members: dict[str, Member] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def member(self, replica_id: str) -> Member:
        """The replica of one of `candidates`."""
        return self._members[replica_id]

    def close_if_unused(self, member: Member) -> None:
        """Close the channel of a replica that has left, unless a call is still on it."""
        if member.is_gone and member.candidate.num_in_flight == 0:
            task = asyncio.create_task(member.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

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
            elif member is None or member.candidate.replica.address != replica.address:
                self._remove(replica_id)
                self._add(replica, lease)
            else:
                member.lease = lease
                member.candidate.update(replica)
        self._pair_up()
        self.on_change()

    def _pair_up(self) -> None:
        candidates = self.candidates.values()
        for candidate in pair_up(candidates):
            assert candidate.lone is not None
            level = log.warning if candidate.lone in MISMATCHES else log.debug  # the rest passes, as after a push
            level("replica.unpaired", replica=candidate.replica_id, reason=candidate.lone.value)
        self.sizes = sizes(candidates)

    def _add(self, replica: common_pb2.Replica, lease: bytes) -> None:
        limit = Limit(self._config.limit, replica.max_running)
        candidate = ReplicaStatus(replica, limit=limit, breaker=Breaker(self._config.breaker))
        self._members[replica.replica_id] = Member(candidate, lease, self.security)
        self.candidates[replica.replica_id] = candidate
        log.info("replica.joined", replica=replica.replica_id, address=replica.address)

    def _remove(self, replica_id: str) -> None:
        member = self._members.pop(replica_id, None)
        if member is None:
            return
        del self.candidates[replica_id]
        member.is_gone = True
        log.info("replica.left", replica=replica_id, num_in_flight=member.candidate.num_in_flight)
        self.close_if_unused(member)

    def _read_policy(self) -> None:
        value = self._policy.values.get(CURRENT_KEY)
        if value is None:
            return
        try:
            current = read_published_version(value)
        except CorruptMessageError as error:
            log.error("policy.unreadable", error=str(error))
            return
        self.published_version, self.min_version = current.policy_version, current.min_policy_version

    async def _follow_replicas(self) -> None:
        while True:
            await self._replicas.changed(_LOOK_AGAIN_S)
            self._refresh()

    async def _follow_policy(self) -> None:
        while True:
            if await self._policy.changed(_LOOK_AGAIN_S):
                self._read_policy()
                self.on_change()

    async def _adapt_limits(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            for candidate in self.candidates.values():
                candidate.adapt_limit()
            self.on_change()

    async def _close(self) -> None:
        for replica_id in list(self._members):
            self._remove(replica_id)
        self._pair_up()
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def open_pool(config: RouterConfig, bus: Bus, security: Security) -> AsyncIterator[Pool]:
    """Follow the run's replicas during the context; on entry all of now are known.

    The context is cancelled when that fails, and the error raised in its place: it would go on with the replicas of
    that moment for ever.
    """
    ttl_s = bus.config.lease_ttl_s
    replicas, policy = await bus.bucket("replicas", ttl_s=ttl_s), await bus.bucket(POLICY_BUCKET)
    async with (
        watched(replicas, ttl_s=ttl_s) as replica_watch,
        watched(policy, keys=CURRENT_KEY) as policy_watch,  # beside it the bucket keeps every version's origin
    ):
        pool = Pool(config, replica_watch, policy_watch, security)
        pool._read_policy()
        pool._refresh()
        try:
            async with asyncio.TaskGroup() as tasks:
                followers = [
                    tasks.create_task(pool._follow_replicas()),
                    tasks.create_task(pool._follow_policy()),
                    tasks.create_task(pool._adapt_limits(ttl_s / 3)),  # leases are renewed as often
                ]
                try:
                    yield pool
                finally:
                    for follower in followers:
                        follower.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None
        finally:
            await pool._close()
