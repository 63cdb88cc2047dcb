"""Consistent hashing: all routers send a session to the same replica, within a bound on its load."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from services.router.balancing import Query, ReplicaStatus, make_balancer
from services.router.balancing.pool_view import is_overloaded
from services.router.config import Balancing
from services.router.tuning import Tuning
from tests.support.router.replica_statuses import Fleet, chosen, described


def test_consistent_hashing_keeps_a_group_together() -> None:
    """All routers agree on its replica without asking each other."""
    pool = Fleet(*(described(name) for name in "abcdefgh"))
    balancer = make_balancer(Balancing.CONSISTENT_HASH, Tuning())
    chosen_for = {chosen(balancer, pool, Query(session_id=f"g/{number}", group_id="g")) for number in range(20)}
    assert len(chosen_for) == 1


def test_consistent_hash_is_the_same_for_two_routers_and_moves_only_what_it_must() -> None:
    """A replica that joins takes its share of the sessions; all others stay. One that leaves gives up only its own."""
    one, other = (make_balancer(Balancing.CONSISTENT_HASH, Tuning()) for _ in range(2))
    pool = Fleet(*(described(f"r{index}") for index in range(7)))
    queries = [Query(session_id=f"session-{index}") for index in range(800)]
    before = [chosen(one, pool, query) for query in queries]
    assert [
        chosen(other, Fleet(*(described(f"r{index}") for index in reversed(range(7)))), query) for query in queries
    ] == before
    assert all(60 < count < 170 for count in collections.Counter(before).values())  # 114 each would be even
    pool.add(described("r7"))
    after = [chosen(one, pool, query) for query in queries]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"r7"}
    assert 50 < len(moved) < 150  # a hundred would be even
    pool.remove("r7")
    assert [chosen(one, pool, query) for query in queries] == before


def test_consistent_hash_gives_larger_replicas_more() -> None:
    """Shares are as slots: here one to three."""
    balancer = make_balancer(Balancing.CONSISTENT_HASH, Tuning())
    pool = Fleet(described("small", max_running=8), described("large", max_running=24))
    counts = collections.Counter(chosen(balancer, pool, Query(session_id=str(index))) for index in range(1000))
    assert 200 < counts["small"] < 300


def test_consistent_hash_bounds_the_load() -> None:
    """A session that all calls share does not bury one replica: no load gets above the ratio times the mean."""
    balancer = make_balancer(Balancing.CONSISTENT_HASH, Tuning(max_load_ratio=1.5))
    pool = Fleet(*(described(f"r{index}", max_running=100) for index in range(4)))
    for num_calls in range(1, 101):
        name = chosen(balancer, pool, Query(session_id="s"))
        assert name is not None
        pool.set_in_flight(name, pool[name].num_in_flight + 1)
        assert pool[name].num_in_flight <= 1.5 * num_calls / 4 + 1
    assert max(each.num_in_flight for each in pool.view.replicas.values()) > 30


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 16)), min_size=1, max_size=8), st.floats(1.0, 3.0))
def test_never_are_all_overloaded(loads: list[tuple[int, int]], ratio: float) -> None:
    """Whatever runs, one replica at least may have one call more."""
    fit = [
        ReplicaStatus(replica_id=str(n), num_in_flight=calls, max_running=slots)
        for n, (calls, slots) in enumerate(loads)
    ]
    assert not all(is_overloaded(each, fit, ratio + 1e-9) for each in fit)
