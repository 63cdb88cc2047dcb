"""The least loaded replica, corrected by what replicas recently had beyond or below their share."""

import heapq
import random
from collections.abc import Sequence

import pytest

from services.router.balancing import PoolView, Query, ReplicaStatus
from services.router.balancing.affinity import AffinityBalancer
from services.router.balancing.fair_share import FairShare
from tests.support.router.replica_statuses import DRAINING, Fleet, described, replica

SIZES = {"a": 8, "b": 16, "c": 32, "d": 8, "e": 16, "f": 32}


@pytest.mark.parametrize("num_calls", [40, 48, 56])
def test_over_time_each_replica_has_its_share(num_calls: int) -> None:
    """Also if that is not a whole number of calls: the load of ten minutes is within 5% of even."""
    chance = random.Random(num_calls)
    balancer = AffinityBalancer(max_sessions=1)
    fleet = Fleet(*(described(name, max_running=size) for name, size in SIZES.items()))
    busy_s = dict.fromkeys(SIZES, 0.0)
    ends: list[tuple[float, str]] = []
    begins, until = [0.0] * num_calls, 600.0
    while begins:
        now = heapq.heappop(begins)
        while ends and ends[0][0] <= now:
            fleet.slots[heapq.heappop(ends)[1]].end()
        picked = balancer.choose(Query(), fleet.view, now)
        assert picked is not None
        fleet.slots[picked.replica_id].begin(now)
        ended_at = now + chance.uniform(2.0, 6.0)
        busy_s[picked.replica_id] += ended_at - now
        heapq.heappush(ends, (ended_at, picked.replica_id))
        if ended_at < until:
            heapq.heappush(begins, ended_at + chance.uniform(0.0, 0.5))
    even_s = sum(busy_s.values()) / sum(SIZES.values())
    for name, size in SIZES.items():
        assert busy_s[name] / (even_s * size) == pytest.approx(1.0, abs=0.05), name


def test_the_past_counts_for_at_most_a_quarter_of_the_slots() -> None:
    """Two replicas, one with all the calls, for an hour."""
    fleet = Fleet(described("busy", max_running=8, in_flight=8), described("idle", max_running=16))
    share = FairShare()
    for second in range(3600):
        share.update(fleet.view, float(second))
    assert share.excess_load(fleet["busy"]) == 0.25
    assert share.excess_load(fleet["idle"]) == -0.25


def test_a_newcomer_owes_nothing() -> None:
    """It has had no calls and need not catch up; nor need one that was away."""
    fleet, share = Fleet(described("old", in_flight=4)), FairShare()
    share.update(fleet.view, 0.0)
    fleet.add(described("new"))
    share.update(fleet.view, 100.0)
    assert share.excess_load(fleet["new"]) == 0.0
    share.update(fleet.view, 101.0)
    assert share.excess_load(fleet["new"]) < 0.0
    fleet.update(replica("new", state=DRAINING))
    share.update(fleet.view, 102.0)
    fleet.update(replica("new"))
    share.update(fleet.view, 103.0)
    assert share.excess_load(fleet["new"]) == 0.0


def test_it_matters_little_how_often_it_is_asked() -> None:
    """A thousand calls a second look at all replicas ten times a second, and find what ten calls a second find."""
    fleet = Fleet(described("busy", max_running=8, in_flight=5), described("idle", max_running=8, in_flight=3))
    looks: list[float] = []

    class Watched(PoolView):
        """Notes when its replicas are looked at."""

        def loads(self, replicas: Sequence[ReplicaStatus]) -> dict[str, float]:
            """Their loads."""
            looks.extend(now for _ in replicas)
            return super().loads(replicas)

    seldom, often = FairShare(), FairShare()
    for tenth in range(50):
        seldom.update(fleet.view, tenth / 10)
    for thousandth in range(5000):
        now = thousandth / 1000
        often.update(Watched(fleet.view.replicas), now)
    assert len(looks) <= 50 * len(fleet.view.replicas)
    assert often.excess_load(fleet["busy"]) == pytest.approx(seldom.excess_load(fleet["busy"]), rel=0.05)
    assert seldom.excess_load(fleet["busy"]) > 0.05


def test_the_distant_past_is_forgotten() -> None:
    """Without calls the difference fades, so that sessions decide again."""
    fleet, share = Fleet(described("one", in_flight=4), described("other")), FairShare()
    for second in range(10):
        share.update(fleet.view, float(second))
    fleet.set_in_flight("one", 0)
    before = share.excess_load(fleet["one"])
    assert before > 0.1
    for second in range(10, 310):
        share.update(fleet.view, float(second))
    assert share.excess_load(fleet["one"]) < before / 10
