"""The live replicas as a push sees them: leases, connections, versions held, and failures."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import grpc.aio
import structlog

from penstock.bus.buckets.replica_lease import ReplicaLeases
from penstock.bus.buckets.watch import Watch
from penstock.errors import ChecksumError, PenstockError, UnavailableError
from penstock.rpc.channel import connect
from penstock.runtime.security import Security
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from services.trainer.weight_sync.failed_replicas import FailedReplicas
from services.trainer.weight_sync.push_calls import Member, NoMembersLeftError, PushCalls, Stub
from services.trainer.weight_sync.push_order import in_turn

log = structlog.get_logger()

# Only one push runs at a time, so an UPDATING replica was left behind by an earlier push, or its lease is outdated.
_PUSHABLE = (
    common_pb2.REPLICA_STATE_READY,
    common_pb2.REPLICA_STATE_UPDATING,
    common_pb2.REPLICA_STATE_BROKEN,
)
_READY = common_pb2.REPLICA_STATE_READY


@dataclass(slots=True, kw_only=True)
class ReplicaPool:
    """Replicas by their leases. Connections are opened when needed, and kept while the replica lives."""

    replicas: Watch
    """The `replicas` bucket."""
    failed: FailedReplicas
    """Replicas whose last push failed."""
    security: Security
    """Tokens and TLS of the calls to replicas."""
    answer_within_s: float
    """Deadline in seconds for a replica to report its state."""
    versions: dict[Member, int] = field(default_factory=dict)
    """The version that each replica reported last; 0 if its weights are not intact."""
    _leases: ReplicaLeases = field(default_factory=ReplicaLeases)
    _connections: dict[Member, tuple[grpc.aio.Channel, Stub]] = field(default_factory=dict)

    @property
    def num_loaded(self) -> int:
        """Number of replicas with a lease that have finished loading."""
        return sum(one.state != common_pb2.REPLICA_STATE_STARTING for one in self._listed())

    def pushable(self, wanted: Callable[[common_pb2.Replica], bool]) -> list[Member]:
        """Return the replicas that can take a push and are `wanted`, in the order of their turns."""
        able = (one for one in self._listed() if one.state in _PUSHABLE and wanted(one))
        return [member_of(one) for one in in_turn(able)]

    def sound(self) -> list[common_pb2.Replica]:
        """Return the replicas that can take a push and did not fail in their last one."""
        return [one for one in self._listed() if one.state in _PUSHABLE and member_of(one) not in self.failed]

    async def ask(
        self, members: tuple[Member, ...], *, lagging_behind: int | None
    ) -> tuple[tuple[Member, ...], dict[Member, PenstockError]]:
        """Ask members for their state; return those that can take a push, and the errors of others.

        A lease does not suffice: it may be outdated, or outlive its holder.

        Args:
            members: Members to ask.
            lagging_behind: Return only those that do not serve this version; None returns all.
        """
        if not members:
            return (), {}
        calls = PushCalls(members, self.stub, "")
        request, timeout_s = rollout_pb2.GetReplicaRequest(), self.answer_within_s
        chosen = []
        try:
            answers = await calls.each(lambda stub, _: stub.GetReplica(request, timeout=timeout_s))
            for member, answer in answers.items():
                replica = answer.replica
                if replica.replica_id != member.replica_id:
                    other = f"{replica.replica_id} answers at {member.address}"
                    calls.fail(member, UnavailableError(f"{member.replica_id}: {other}; it was replaced"))
                elif replica.state in _PUSHABLE and not serves(replica, lagging_behind):
                    chosen.append(member)
                    self.versions[member] = replica.policy_version if replica.state == _READY else 0
        except NoMembersLeftError:
            log.debug("push.no_replica_answered")
        return tuple(chosen), calls.failures

    async def add_failure(self, member: Member, error: PenstockError, version: int) -> None:
        """Record that a push to `member` failed, and close the connection."""
        wait_s = self.failed.add(member, now=time.monotonic())
        # A replica with wrong checksums is BROKEN, and gets no requests.
        event = "replica.quarantined" if isinstance(error, ChecksumError) else "push.replica_failed"
        log.error(event, version=version, replica_id=member.replica_id, reason=str(error), retry_after_s=wait_s)
        await self._disconnect(member)

    async def forget_the_dead(self) -> set[Member]:
        """Close the connections to replicas whose lease is gone, and forget their versions and failures.

        Returns:
            The replicas with a lease.
        """
        live = {member_of(one) for one in self._listed()}
        for member in self._connections.keys() - live:
            await self._disconnect(member)
        self.failed.keep_only(live)
        self.versions = {member: version for member, version in self.versions.items() if member in live}
        return live

    def stub(self, member: Member) -> Stub:
        """Return the connection to `member`."""
        if member not in self._connections:
            channel = connect(member.address, self.security)
            self._connections[member] = channel, rollout_pb2_grpc.RolloutServiceStub(channel)
        return self._connections[member][1]

    async def close(self) -> None:
        """Close all connections."""
        for member in tuple(self._connections):
            await self._disconnect(member)

    def _listed(self) -> Collection[common_pb2.Replica]:
        """Return the replicas with a lease."""
        return self._leases.read(self.replicas.values).values()

    async def _disconnect(self, member: Member) -> None:
        if member in self._connections:
            channel, _ = self._connections.pop(member)
            await channel.close(None)


def member_of(replica: common_pb2.Replica) -> Member:
    """Return `replica` as a member of a push."""
    return Member(replica.replica_id, replica.address, max(1, replica.num_ranks))


def serves(replica: common_pb2.Replica, version: int | None) -> bool:
    """Return whether `replica` answers requests with this version."""
    return replica.policy_version == version and replica.state == _READY
