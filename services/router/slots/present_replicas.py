"""The replicas that hold a lease, each with its slots, as balancing sees them."""

import asyncio

import structlog

from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import MISMATCHES, UNBOUNDED, PoolView, ReplicaStatus, pair_up
from services.router.connection import ReplicaConnection
from services.router.pool import Pool
from services.router.slots.replica_slots import ReplicaSlots
from services.router.tuning import Tuning

log = structlog.get_logger()


class PresentReplicas:
    """The replicas of a pool, in step with their leases. Those that have left close once their last call has ended."""

    def __init__(self, tuning: Tuning, security: Security) -> None:
        """Begin without any; `follow` adds them.

        Args:
            tuning: Constants.
            security: Credentials for calls to replicas.
        """
        self.slots: dict[str, ReplicaSlots] = {}
        """The slots of each; read only."""
        self.sizes: list[int] = []
        """Their sizes in tokens, which distinguish what calls need; read only."""
        self.largest = UNBOUNDED
        """The most tokens that any replica or pair takes; read only."""
        self.last_largest = UNBOUNDED
        """The most that any took since there was none; read only."""
        self._tuning = tuning
        self._security = security
        self._statuses: dict[str, ReplicaStatus] = {}
        self._with_room: dict[str, ReplicaStatus] = {}
        self.view = PoolView(self._statuses, self._with_room)
        """The replicas as balancing sees them."""
        self._closing: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Close the channels of all replicas without running calls."""
        for replica_id in list(self.slots):
            self._remove(replica_id)
        await asyncio.gather(*self._closing)

    def follow(self, pool: Pool) -> bool:
        """Synchronise the replicas with the leases of `pool`; return whether any has come, changed or gone."""
        leases, was_empty = pool.leases, not self.slots
        gone = self.slots.keys() - leases.keys()
        for replica_id in gone:
            self._remove(replica_id)
        changed = [
            lease
            for replica_id, lease in leases.items()
            if (known := self.slots.get(replica_id)) is None or known.lease is not lease
        ]
        for lease in changed:
            self._take_lease(lease)
        held_out = frozenset(pool.held_out.replica_ids)
        for replica_id, replica in self.slots.items():
            replica.hold_out(replica_id in held_out)
        if not gone and not changed:
            return False
        self._pair_up(pool)
        self.sizes, self.largest = self.view.sizes(), self.view.largest()
        if self.slots:
            self.last_largest = self.largest if was_empty else max(self.largest, self.last_largest)
        return True

    def close_if_unused(self, replica: ReplicaSlots) -> None:
        """Close the channel of a replica that has left, unless a call still runs there."""
        if replica.is_gone and replica.num_in_flight == 0:
            task = asyncio.create_task(replica.connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _take_lease(self, lease: common_pb2.Replica) -> None:
        """Update the lease's replica, or add it."""
        replica = self.slots.get(lease.replica_id)
        if replica is not None and replica.connection.address != lease.address:
            self._remove(lease.replica_id)
            replica = None
        if replica is None:
            self._add(lease)
        else:
            replica.update(lease)

    def _add(self, lease: common_pb2.Replica) -> None:
        connection = ReplicaConnection(lease.replica_id, lease.address, self._security)
        self.slots[lease.replica_id] = ReplicaSlots(lease, connection, self._tuning, self._publish)
        log.info("replica.joined", replica_id=lease.replica_id, address=lease.address)

    def _remove(self, replica_id: str) -> None:
        replica = self.slots.pop(replica_id)
        del self._statuses[replica_id]
        self._with_room.pop(replica_id, None)
        replica.is_gone = True
        log.info("replica.left", replica_id=replica_id, num_in_flight=replica.num_in_flight)
        self.close_if_unused(replica)

    def _publish(self, replica: ReplicaSlots, status: ReplicaStatus) -> None:
        if not replica.is_gone:
            self._statuses[status.replica_id] = status
            if status.has_room:
                self._with_room[status.replica_id] = status
            else:
                self._with_room.pop(status.replica_id, None)

    def _pair_up(self, pool: Pool) -> None:
        for replica_id, partners in pair_up(pool.leases.values()).items():
            if self.slots[replica_id].pair(partners):
                assert partners.lack is not None
                level = log.warning if partners.lack in MISMATCHES else log.debug
                level("replica.unpaired", replica_id=replica_id, reason=partners.lack.value)
