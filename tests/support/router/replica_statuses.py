"""Replicas as the router's balancers see them, made up."""

import dataclasses
import time
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.bus.buckets.replica_lease import write_replica
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import Balancer, PoolView, Query, ReplicaStatus, pair_up
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.slots.breaker import BreakerState
from services.router.slots.replica_slots import ReplicaSlots
from services.router.slots.slot_pool import SlotPool
from services.router.tuning import LimitTuning, Tuning

READY = common_pb2.REPLICA_STATE_READY
UPDATING = common_pb2.REPLICA_STATE_UPDATING
STARTING = common_pb2.REPLICA_STATE_STARTING
BROKEN = common_pb2.REPLICA_STATE_BROKEN
DRAINING = common_pb2.REPLICA_STATE_DRAINING
UNIFIED = common_pb2.REPLICA_ROLE_UNIFIED
PREFILL = common_pb2.REPLICA_ROLE_PREFILL
DECODE = common_pb2.REPLICA_ROLE_DECODE


def replica(
    replica_id: str = "a",
    *,
    state: int = READY,
    version: int = 0,
    running: int = 0,
    queued: int = 0,
    max_running: int = 8,
    role: int = UNIFIED,
    backend: str = "mooncake",
    tensor_parallel: int = 1,
    max_tokens: int = 0,
) -> common_pb2.Replica:
    described = common_pb2.Replica(
        replica_id=replica_id,
        address="127.0.0.1:1",
        role=role,
        state=state,
        policy_version=version,
        num_running=running,
        num_queued=queued,
        max_running=max_running,
        max_tokens=max_tokens,
    )
    if role in (PREFILL, DECODE) and backend:
        described.disaggregation.transfer_backend = backend
        described.disaggregation.tensor_parallel = tensor_parallel
    return described


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A lease, and what the router knows beside it."""

    lease: common_pb2.Replica
    in_flight: int = 0
    failing: bool = False
    rejecting: bool = False


def described(
    replica_id: str, *, in_flight: int = 0, failing: bool = False, rejecting: bool = False, **fields: Any
) -> Described:
    """A replica whose limit is twice its max_running, with calls in flight at time 0."""
    return Described(lease=replica(replica_id, **fields), in_flight=in_flight, failing=failing, rejecting=rejecting)


_NO_CONNECTION: Any = None


class Fleet:
    """Leases and slots of a pool without a network, at time 0."""

    def __init__(self, *replicas: Described) -> None:
        self.slots: dict[str, ReplicaSlots] = {}
        self._statuses: dict[str, ReplicaStatus] = {}
        self.view = PoolView(self._statuses)
        for each in replicas:
            self.add(each)

    def add(self, given: Described) -> None:
        tuning = Tuning(limit=LimitTuning(factor=2.0))
        made = ReplicaSlots(given.lease, _NO_CONNECTION, tuning, self._publish)
        self.slots[given.lease.replica_id] = made
        if given.failing:
            made.fail(0.0, probe=False, unreachable=True)
        if given.rejecting:
            made.reject(1.0 - 0.25, is_overload=False)
        self.set_in_flight(given.lease.replica_id, given.in_flight)
        self.pair_up()

    def remove(self, replica_id: str) -> None:
        del self.slots[replica_id], self._statuses[replica_id]
        self.pair_up()

    def update(self, lease: common_pb2.Replica) -> None:
        self.slots[lease.replica_id].update(lease)
        self.pair_up()

    def pair_up(self) -> list[str]:
        """Those that have newly lost their partners."""
        found = pair_up(each.lease for each in self.slots.values())
        return [name for name, partners in found.items() if self.slots[name].pair(partners)]

    def set_in_flight(self, replica_id: str, count: int) -> None:
        slots = self.slots[replica_id]
        while slots.num_in_flight < count:
            slots.begin(0.0)
        while slots.num_in_flight > count:
            slots.end()

    def __getitem__(self, replica_id: str) -> ReplicaStatus:
        return self._statuses[replica_id]

    def __len__(self) -> int:
        return len(self._statuses)

    def _publish(self, _: ReplicaSlots, status: ReplicaStatus) -> None:
        self._statuses[status.replica_id] = status


def chosen(balancer: Balancer, fleet: Fleet, query: Query | None = None) -> str | None:
    """Choose and record, as the router does."""
    query = query or Query()
    picked = balancer.choose(query, fleet.view, 0.0)
    if picked is None:
        return None
    balancer.record(query, picked.replica_id)
    return picked.replica_id


class Clock:
    """A clock that a test moves, from the present on: deadlines that a test takes from the real one are still ahead."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class Leases:
    """Replicas' leases, as the bus would have them."""

    def __init__(self, *replicas: common_pb2.Replica) -> None:
        self.values = {each.replica_id: write_replica(each) for each in replicas}

    def put(self, lease: common_pb2.Replica) -> None:
        self.values = {**self.values, lease.replica_id: write_replica(lease)}


@asynccontextmanager
async def slot_pool(
    *replicas: common_pb2.Replica, tuning: Tuning | None = None, clock: Any = None, **settings: Any
) -> AsyncIterator[tuple[SlotPool, Pool, Leases]]:
    """The slots of replicas that nobody calls."""
    leases = Leases(*replicas)
    pool = Pool(leases, types.SimpleNamespace(values={}), types.SimpleNamespace(values={}))  # type: ignore[arg-type]
    pool.refresh()
    optional = {} if clock is None else {"clock": clock}
    slots = SlotPool(RouterConfig(**settings), pool, tuning=tuning or Tuning(), security=Security(), **optional)
    try:
        yield slots, pool, leases
    finally:
        await slots.aclose()


def breakers(slots: SlotPool) -> dict[str, BreakerState]:
    return {name: each.breaker_state for name, each in slots.replicas.items()}
