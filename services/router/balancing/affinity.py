"""Session affinity; new sessions go to their group's replica, new groups to the least loaded one.

Invariant: a session stays on its replica while that is fit, because its prefix cache holds the earlier turns. A group's
sessions begin where the first of them began, because that prefix cache holds their prompt. They may exceed the
replica's limit a little, and then wait for it, unless another has a free slot.
"""

import collections
import dataclasses

from services.router.balancing.fair_share import FairShare
from services.router.balancing.pool_view import PoolView, Query
from services.router.balancing.replica_status import ReplicaStatus, UnroutableReason

_BEGUN_FACTOR = 1.5
"""A begun session or group may exceed its replica's limit, up to max_running times this: its calls then wait a moment
in the engine's own queue, which costs less than computing their prompt again. The limit bounds new sessions."""
_MIN_SLOTS_TO_EXCEED = 4
"""A smaller replica takes none beyond its limit: with two slots the next one becomes free after half a sample's time.
64 such replicas and groups of eight took 8 to 15% fewer optimizer steps otherwise (bench/async_loop)."""
_FULL = (UnroutableReason.FULL, UnroutableReason.PARTNERS_FULL)
_MAX_LOAD_RATIO = _BEGUN_FACTOR
"""A call leaves its full replica for one that has this many times fewer calls per slot, and so a free slot. Behind half
as many calls as the replica runs, the call would wait far longer than its prompt takes; the rest of its group follows,
so that they pay once. With 2.0, eight replicas of eight slots and groups of eight took 1% fewer optimizer steps with
max_staleness = 4, and computed a prompt 1.8 instead of 2.1 times (simulated lengths as in bench/async_loop)."""


class Sessions:
    """The replica of each of the `max_sessions` most recently used sessions."""

    def __init__(self, max_sessions: int) -> None:
        """Remember at most `max_sessions`."""
        self._max_sessions = max_sessions
        self._replica_of: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of sessions remembered."""
        return len(self._replica_of)

    def get(self, session_id: str) -> str | None:
        """Return the session's replica; None if it is not remembered."""
        return self._replica_of.get(session_id)

    def num_of(self, replica_id: str) -> int:
        """Return the number of the replica's sessions."""
        return self._num_of.get(replica_id, 0)

    def bind(self, session_id: str, replica_id: str) -> None:
        """Assign the session to the replica; calls without a session id are ignored."""
        if not session_id:
            return
        self._drop(self._replica_of.pop(session_id, None))
        self._replica_of[session_id] = replica_id
        self._num_of[replica_id] = self.num_of(replica_id) + 1
        if len(self._replica_of) > self._max_sessions:
            self._drop(self._replica_of.popitem(last=False)[1])

    def _drop(self, replica_id: str | None) -> None:
        if replica_id is None:
            return
        self._num_of[replica_id] -= 1
        if self._num_of[replica_id] == 0:
            del self._num_of[replica_id]


class AffinityBalancer:
    """Chooses the session's own replica, or else its group's, if it is fit; else the least loaded, and among equals the
    one with the fewest sessions.

    Loads and sessions are counted per slot; the load includes the new call (shortest expected delay) and recent over-
    or under-use (`fair_share`).
    """

    reads_blocks = False

    def __init__(self, *, max_sessions: int) -> None:
        """Remember the replicas of `max_sessions` sessions, and of as many groups."""
        self.sessions = Sessions(max_sessions)
        self._groups = Sessions(max_sessions)
        self._fair_share = FairShare()

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit, or if the call waits for its own.

        Only a call with a home waits. If its group has moved on, its own replica is not its home, and both hold the
        prompt. The call then goes to whichever takes it, its own first. Its own decides whether it waits.
        """
        own = self._find_own(query, pool)
        if own is not None and _can_go_on(own, query, pool, now):
            return own
        home = pool.replicas.get(query.home)
        if home is not None and home is not own and _can_go_on(home, query, pool, now):
            return home  # its group has moved on, and the prompt is here too
        if home is not None and own is not None and _should_wait(own, query, pool, now):
            return None
        self._fair_share.update(pool, now)
        fit = pool.find_fit(query, now)
        loads = pool.next_loads(fit)

        def rank(replica: ReplicaStatus) -> tuple[float, float, str]:
            num_sessions = self.sessions.num_of(replica.replica_id)
            load = loads[replica.replica_id] + self._fair_share.excess_load(replica)
            return load, num_sessions / replica.max_running, replica.replica_id

        return min(fit, key=rank, default=None)

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return the id of the call's own replica and whether it is full; an empty id if another should take the call.

        Any other replica would compute the whole prompt again.
        """
        own = self._find_own(query, pool)
        if own is not None and _can_go_on(own, query, pool, now):
            return own.replica_id, False
        if own is not None and _should_wait(own, query, pool, now):
            return own.replica_id, True
        return "", False

    def record(self, query: Query, replica_id: str) -> None:
        """Assign the session to this replica; if the session is new, its group's next sessions follow it."""
        if self.sessions.get(query.session_id) is None:
            self._groups.bind(query.group_id, replica_id)
        self.sessions.bind(query.session_id, replica_id)

    def _find_own(self, query: Query, pool: PoolView) -> ReplicaStatus | None:
        """Return the call's own replica, as balancer.py defines it; None if it has none, or that replica has left."""
        own_id = self.sessions.get(query.session_id) or self._groups.get(query.group_id)
        return pool.replicas.get(own_id or "")


def _can_go_on(own: ReplicaStatus, query: Query, pool: PoolView, now: float) -> bool:
    """Return whether the call's own replica, or its home, takes it; it may exceed the limit for new sessions."""
    if pool.is_fit(own, query, now):
        return True
    if own.max_running < _MIN_SLOTS_TO_EXCEED:
        return False
    most = max(own.max_in_flight, int(_BEGUN_FACTOR * own.max_running))
    return pool.is_fit(dataclasses.replace(own, max_in_flight=most), query, now)


def _should_wait(own: ReplicaStatus, query: Query, pool: PoolView, now: float) -> bool:
    """Return whether the call's own replica is merely full, and no other has a free slot."""
    if pool.find_reason(own, query, now) not in _FULL:
        return False
    fit = pool.find_fit(query, now)
    loads = pool.loads((own, *fit))
    own_load = loads[own.replica_id]
    return own_load <= _MAX_LOAD_RATIO * min((loads[each.replica_id] for each in fit), default=own_load)
