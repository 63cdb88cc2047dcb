"""How long a replica that rejects calls is offered none."""

from penstock.v1 import common_pb2
from tests.support.router.replica_statuses import Fleet, described, replica


def pauses(fleet: Fleet, count: int, *, is_overload: bool, now: float = 100.0) -> list[float]:
    """The pauses of a replica that rejects each call that it is offered."""
    found = []
    for _ in range(count):
        fleet.slots["r"].reject(now, is_overload=is_overload)
        found.append(fleet["r"].rejecting_until - now)
        now = fleet["r"].rejecting_until
    return found


def test_a_replica_that_is_not_ready_is_asked_ever_more_rarely() -> None:
    """As while the image store is away; calls that it rejects at the same moment count once."""
    fleet = Fleet(described("r"))
    assert pauses(fleet, 5, is_overload=False) == [0.25, 0.5, 1.0, 2.0, 2.0]
    fleet.slots["r"].complete()
    for _ in range(9):
        fleet.slots["r"].reject(200.0, is_overload=False)
    assert fleet["r"].rejecting_until == 200.25


def test_a_replica_that_is_overloaded_is_asked_as_often_as_ever() -> None:
    """Its queue may be shorter any moment."""
    assert pauses(Fleet(described("r")), 5, is_overload=True) == [0.25] * 5


def test_a_pause_ends_with_what_the_replica_waited_for() -> None:
    """Its lease says that it has other weights, or is in another state."""
    for changes in ({"version": 1}, {"state": common_pb2.REPLICA_STATE_UPDATING}):
        fleet = Fleet(described("r"))
        pauses(fleet, 4, is_overload=False)
        fleet.update(replica("r"))
        assert fleet["r"].rejecting_until > 0.0
        fleet.update(replica("r", **changes))
        assert fleet["r"].rejecting_until == 0.0
        assert pauses(fleet, 1, is_overload=False) == [0.25]
