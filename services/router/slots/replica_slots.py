"""The slots of one replica: the router's counters, limit and circuit breaker, and the view that balancing gets of them.

Invariant: every change publishes a new immutable `ReplicaStatus`.
"""

from collections.abc import Callable

from penstock.runtime.backoff import Backoff
from penstock.v1 import common_pb2
from services.router.balancing import NEEDS_NONE, PD_ROLES, UNBOUNDED, Partners, ReplicaStatus, UnroutableReason
from services.router.connection import ReplicaConnection
from services.router.limits import Limit
from services.router.slots.breaker import Breaker, BreakerState
from services.router.tuning import Tuning

REJECT_PAUSE_S = 0.25
"""Seconds without calls for a replica that rejected one; it is asked four times a second whether it is ready."""
_MAX_REJECT_PAUSE_S = 2.0
"""Maximum pause in seconds. While a replica rejects every call for reasons other than load, such as an unreachable
image store, each pause doubles up to this; a call waits at most this much longer than needed once the replica is ready
again."""

_REJECT_PAUSES = Backoff(REJECT_PAUSE_S, _MAX_REJECT_PAUSE_S)

_REASON_OF_STATE = {
    common_pb2.REPLICA_STATE_UNSPECIFIED: UnroutableReason.STARTING,
    common_pb2.REPLICA_STATE_STARTING: UnroutableReason.STARTING,
    common_pb2.REPLICA_STATE_BROKEN: UnroutableReason.BROKEN,
    common_pb2.REPLICA_STATE_DRAINING: UnroutableReason.DRAINING,
}


class ReplicaSlots:
    """The slot pool's record of one replica. The pool and its slots mutate it; all others read `status`."""

    def __init__(
        self,
        lease: common_pb2.Replica,
        connection: ReplicaConnection,
        tuning: Tuning,
        publish: Callable[["ReplicaSlots", ReplicaStatus], None],
    ) -> None:
        """Start with the lease; `publish` gets every new status."""
        self.connection = connection
        self.is_gone = False
        """Whether its lease has ended; calls may still run."""
        self.num_rejections = 0
        """Calls that it rejected since its last complete answer."""
        self.partners = NEEDS_NONE
        self._publish = publish
        self._limit = Limit(tuning.limit, lease.max_running)
        self._breaker = Breaker(tuning.breaker)
        self._num_in_flight = 0
        self._rejecting_until = 0.0
        self._num_pauses = 0
        self._was_settled = False
        self._is_held_out = False
        self.lease = lease
        self.update(lease)
        self._was_settled = self.status.is_settled

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self.lease.replica_id

    @property
    def num_in_flight(self) -> int:
        """Slots given out."""
        return self._num_in_flight

    @property
    def has_free_slot(self) -> bool:
        """Whether it has fewer calls than it runs at once."""
        return self.status.load < 1

    @property
    def breaker_state(self) -> BreakerState:
        """The state of its circuit breaker."""
        return self._breaker.state

    def update(self, lease: common_pb2.Replica) -> None:
        """Take a new lease."""
        if (lease.state, lease.policy_version) != (self.lease.state, self.lease.policy_version):
            self._num_pauses, self._rejecting_until = 0, 0.0  # the reason for its rejections may be gone
        self.lease = lease
        self._num_elsewhere = max(0, lease.num_running + lease.num_queued - self._num_in_flight)
        self._refresh()

    def hold_out(self, is_held_out: bool) -> None:
        """Set whether it is held out of pushes."""
        if is_held_out != self._is_held_out:
            self._is_held_out = is_held_out
            self._refresh()

    def pair(self, partners: Partners) -> bool:
        """Set its partners; return whether it lacks them for a new reason."""
        if partners is self.partners or partners == self.partners:
            return False
        is_new = partners.lack is not None and partners.lack is not self.partners.lack
        self.partners = partners
        self._refresh()
        return is_new

    def adapt_limit(self) -> None:
        """Adapt the limit to the lease; once per lease interval.

        During a push all calls are queued, and just after it the lease may still report that: it is not load.
        """
        is_settled, was_settled = self.status.is_settled, self._was_settled
        self._was_settled = is_settled
        if is_settled and was_settled:
            lease = self.lease
            self._limit.report(max_running=lease.max_running, num_queued=lease.num_queued, kv_use=lease.kv_use)
            if self._limit.max_in_flight != self.status.max_in_flight:
                self._refresh()

    def begin(self, now: float) -> bool:
        """Give out a slot; return whether its call probes the replica."""
        self._num_in_flight += 1
        self._limit.use(self._num_in_flight)
        is_probe = self._breaker.begin(now)
        self._refresh()
        return is_probe

    def end(self) -> None:
        """Take a slot back."""
        self._num_in_flight -= 1
        self._refresh()

    def succeed(self, *, probe: bool) -> None:
        """Note that the call got an answer, or the first part of one."""
        self._breaker.succeed(probe=probe)
        self._refresh()

    def reject(self, now: float, *, is_overload: bool) -> None:
        """Note that the replica rejected the call, which is not a failure."""
        self.num_rejections += 1
        if self._rejecting_until <= now:  # once for all calls that it rejects at the same moment
            if is_overload:
                self._limit.reject()
            self._num_pauses = 0 if is_overload else self._num_pauses + 1
        self._rejecting_until = now + _REJECT_PAUSES.after(self._num_pauses)
        self._refresh()

    def complete(self) -> None:
        """Note a complete answer, or one that its caller has cut: the replica no longer rejects calls."""
        self.num_rejections = self._num_pauses = 0

    def fail(self, now: float, *, probe: bool, unreachable: bool) -> None:
        """Note that the replica broke the call off, or could not be reached."""
        self._breaker.fail(now, probe=probe, unreachable=unreachable)
        self._refresh()

    def abandon(self, *, probe: bool) -> None:
        """Note that the call ended without a verdict on the replica."""
        self._breaker.abandon(probe=probe)
        self._refresh()

    def _refresh(self) -> None:
        lease = self.lease
        self.status = ReplicaStatus(
            replica_id=lease.replica_id,
            role=lease.role,
            policy_version=lease.policy_version,
            max_tokens=lease.max_tokens or UNBOUNDED,
            max_running=max(1, lease.max_running),
            is_settled=lease.state == common_pb2.REPLICA_STATE_READY,
            is_held_out=self._is_held_out,
            unroutable=_find_lease_reason(lease) or self.partners.lack,
            partner_ids=self.partners.replica_ids,
            num_in_flight=self._num_in_flight,
            num_elsewhere=self._num_elsewhere,
            max_in_flight=self._limit.max_in_flight,
            rejecting_until=self._rejecting_until,
            failing_until=self._breaker.blocked_until,
        )
        self._publish(self, self.status)


def _find_lease_reason(lease: common_pb2.Replica) -> UnroutableReason | None:
    """Return the lease's reason against the replica, apart from versions and partners."""
    reason = _REASON_OF_STATE.get(lease.state)
    if lease.role in PD_ROLES:
        if not lease.HasField("disaggregation"):
            return reason or UnroutableReason.ROLE
        if lease.state == common_pb2.REPLICA_STATE_UPDATING:
            # It would take no call before the end of the push, and then have a version different from its partner's.
            return UnroutableReason.UPDATING
    elif lease.role != common_pb2.REPLICA_ROLE_UNIFIED:
        return reason or UnroutableReason.ROLE
    return reason
