"""The least loaded replica, and what replicas have had too much or too little of late."""

import heapq
import random

import pytest

from services.router.balancing import Query
from services.router.balancing.affinity import AffinityBalancer
from services.router.balancing.fair_share import FairShare
from tests.replica_statuses import DRAINING, candidate, pool_of, replica

SIZES = {"a": 8, "b": 16, "c": 32, "d": 8, "e": 16, "f": 32}


@pytest.mark.parametrize("num_calls", [40, 48, 56])
def test_over_time_each_replica_has_its_part(num_calls: int) -> None:
    """Also where that is no whole number of calls: the load of ten minutes is within 5% of even."""
    chance = random.Random(num_calls)
    policy = AffinityBalancer(max_sessions=1)
    pool = pool_of(*(candidate(name, max_running=size) for name, size in SIZES.items()))
    busy_s = dict.fromkeys(SIZES, 0.0)
    ends: list[tuple[float, str]] = []
    begins, until = [0.0] * num_calls, 600.0
    while begins:
        now = heapq.heappop(begins)
        while ends and ends[0][0] <= now:
            pool[heapq.heappop(ends)[1]].num_in_flight -= 1
        picked = policy.choose(Query(), pool, now)
        assert picked is not None
        picked.num_in_flight += 1
        ended_at = now + chance.uniform(2.0, 6.0)
        busy_s[picked.replica_id] += ended_at - now
        heapq.heappush(ends, (ended_at, picked.replica_id))
        if ended_at < until:
            heapq.heappush(begins, ended_at + chance.uniform(0.0, 0.5))
    even_s = sum(busy_s.values()) / sum(SIZES.values())
    for name, size in SIZES.items():
        assert busy_s[name] / (even_s * size) == pytest.approx(1.0, abs=0.05), name


def test_the_past_counts_for_a_quarter_of_the_places_at_most() -> None:
    """Two replicas, one with all the calls, for an hour."""
    busy, idle = candidate("busy", max_running=8), candidate("idle", max_running=16)
    busy.num_in_flight = 8
    surplus = FairShare()
    for second in range(3600):
        surplus.look([busy, idle], float(second))
    assert surplus.load(busy) == 0.25
    assert surplus.load(idle) == -0.25


def test_who_comes_owes_nothing() -> None:
    """A newcomer has had no calls, and is not to catch up on them; nor is one that was away."""
    old, new = candidate("old"), candidate("new")
    old.num_in_flight = 4
    surplus = FairShare()
    surplus.look([old], 0.0)
    surplus.look([old, new], 100.0)
    assert surplus.load(new) == 0.0
    surplus.look([old, new], 101.0)
    assert surplus.load(new) < 0.0
    new.update(replica("new", state=DRAINING))
    surplus.look([old, new], 102.0)
    new.update(replica("new"))
    surplus.look([old, new], 103.0)
    assert surplus.load(new) == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    """Without calls the difference fades, so that sessions decide again."""
    one, other = candidate("one"), candidate("other")
    one.num_in_flight = 4
    surplus = FairShare()
    for second in range(10):
        surplus.look([one, other], float(second))
    one.num_in_flight = 0
    before = surplus.load(one)
    assert before > 0.1
    for second in range(10, 310):
        surplus.look([one, other], float(second))
    assert surplus.load(one) < before / 10
