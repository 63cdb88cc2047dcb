"""The replicas that hold a lease, the published policy version, and the held-out replicas, read from the bus.

Invariant: a replica is listed exactly while its lease lives for this process (`penstock.bus.buckets.watch`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import structlog

from penstock.bus.buckets.replica_lease import ReplicaLeases
from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import Bus
from penstock.errors import CorruptMessageError
from penstock.records.held_out_replicas import HELD_OUT_KEY, read_held_out_replicas
from penstock.records.published_version import CURRENT_KEY, POLICY_BUCKET, read_published_version
from penstock.runtime.duty_cycle import DutyCycle
from penstock.v1 import common_pb2, trainer_pb2

log = structlog.get_logger()

_REFRESH_S = 0.2
"""Maximum seconds between calls of the listeners: leases end, and circuit breakers open, without an event."""
_REFRESH_SHARE = 0.05
"""Share of the router's time for refreshing, without what it takes to give slots to calls. A look at all leases takes a
millisecond for each 500, and those of 500 that all take calls change 300 times a second."""


class Pool:
    """The router's knowledge of the run, from the buckets `replicas` and `policy`."""

    def __init__(self, replicas: Watch, policy: Watch, held_out: Watch) -> None:
        """Use `open_pool`."""
        self.leases: Mapping[str, common_pb2.Replica] = {}
        """The replicas by id. A changed lease replaces its entry."""
        self.published_version = 0
        """The most recently published policy version; 0 before the first."""
        self.min_version = 0
        """Oldest policy version within the staleness bound."""
        self.held_out = trainer_pb2.HeldOutReplicas()
        """The replicas that are held out of pushes for an evaluation."""
        self.on_change: Callable[[], float] = lambda: 0.0
        """Called when something may have changed, and every `_REFRESH_S`; returns the seconds of processor time that it
        spent on giving slots to calls."""
        self.on_lease_interval: Callable[[], None] = lambda: None
        """Called once per lease renewal interval."""
        self._replicas = replicas
        self._policy = policy
        self._held_out = held_out
        self._parsed = ReplicaLeases()

    def refresh(self) -> float:
        """Read the leases; return what `on_change` returns."""
        self.leases = self._parsed.read(self._replicas.values)
        return self.on_change()

    def read_versions(self) -> None:
        """Read the published version."""
        value = self._policy.values.get(CURRENT_KEY)
        if value is None:
            return
        try:
            current = read_published_version(value)
        except CorruptMessageError as error:
            log.error("policy.unreadable", error=str(error))
            return
        self.published_version, self.min_version = current.policy_version, current.min_policy_version
        self.on_change()

    def read_held_out(self) -> None:
        """Read the held-out replicas."""
        value = self._held_out.values.get(HELD_OUT_KEY)
        if value is None:
            return
        try:
            self.held_out = read_held_out_replicas(value)
        except CorruptMessageError as error:
            log.error("held_out.unreadable", error=str(error))
            return
        self.on_change()

    async def follow_replicas(self) -> None:
        """Call `refresh` forever, once for all changes since the last time."""
        duty = DutyCycle(share=_REFRESH_SHARE, max_rest_s=_REFRESH_S)
        known = -1
        while True:
            await self._replicas.changed(_REFRESH_S, since=known)
            known = self._replicas.num_changes
            with duty.work():
                served_s = self.refresh()
            duty.leave_out(served_s)  # a rest would only keep the next calls from the slots that come free meanwhile
            await duty.rest()

    async def follow_policy(self) -> None:
        """Call `read_versions` forever."""
        known = -1
        while True:
            if await self._policy.changed(_REFRESH_S, since=known):
                known = self._policy.num_changes
                self.read_versions()

    async def follow_held_out(self) -> None:
        """Call `read_held_out` forever."""
        known = -1
        while True:
            if await self._held_out.changed(_REFRESH_S, since=known):
                known = self._held_out.num_changes
                self.read_held_out()

    async def follow_interval(self, interval_s: float) -> None:
        """Call `on_lease_interval` forever."""
        while True:
            await asyncio.sleep(interval_s)
            self.on_lease_interval()


@asynccontextmanager
async def open_pool(bus: Bus) -> AsyncIterator[Pool]:
    """Follow the run's replicas during the context; on entry all present ones are known.

    If following fails, the context is cancelled and the error is raised in its place: otherwise the router would keep
    its last list of replicas forever.
    """
    ttl_s = bus.config.lease_ttl_s
    replicas, policy = await bus.bucket("replicas", ttl_s=ttl_s), await bus.bucket(POLICY_BUCKET)
    async with (
        watched(replicas, ttl_s=ttl_s) as replica_watch,
        watched(policy, keys=CURRENT_KEY) as policy_watch,  # the bucket also holds the origin of every version
        watched(policy, keys=HELD_OUT_KEY) as held_out_watch,
    ):
        pool = Pool(replica_watch, policy_watch, held_out_watch)
        pool.read_versions()
        pool.read_held_out()
        pool.refresh()
        try:
            async with asyncio.TaskGroup() as tasks:
                followers = [
                    tasks.create_task(pool.follow_replicas()),
                    tasks.create_task(pool.follow_policy()),
                    tasks.create_task(pool.follow_held_out()),
                    tasks.create_task(pool.follow_interval(ttl_s / 3)),  # leases are renewed at this interval
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
