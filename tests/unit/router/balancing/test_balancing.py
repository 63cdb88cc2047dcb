"""What holds for every rule that chooses a replica, and what the router says when there is none."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.balancing import NoReplica, Query, UnroutableReason, make_balancer
from services.router.config import Balancing
from services.router.tuning import Tuning
from tests.support.router.random_fleets import fleets
from tests.support.router.replica_statuses import (
    DECODE,
    DRAINING,
    PREFILL,
    READY,
    UNIFIED,
    UPDATING,
    Described,
    Fleet,
    chosen,
    described,
    replica,
)

queries = st.builds(
    Query,
    session_id=st.sampled_from(["", "s", "t"]),
    min_version=st.integers(0, 6),
    excluded=st.frozensets(st.sampled_from("abcdefgh")),
    blocks=st.tuples(st.integers(0, 3)),
    num_tokens=st.sampled_from([0, 10, 11, 21]),
)


@pytest.mark.parametrize("name", Balancing)
@given(fleets, queries, st.none() | st.sampled_from("abcdefgh"))
def test_never_chooses_what_may_not_be_chosen_and_always_chooses_what_may(
    name: Balancing, fleet: Fleet, query: Query, own: str | None
) -> None:
    """Whatever the pool and the balancer: the chosen replica is routable, and none is chosen only if none is."""
    balancer = make_balancer(name, Tuning())
    if own is not None:
        balancer.record(query, own)
    picked = balancer.choose(query, fleet.view, 0.5)
    leases = {replica_id: slots.lease for replica_id, slots in fleet.slots.items()}
    able = {
        replica_id
        for replica_id, lease in leases.items()
        if lease.state in (READY, UPDATING)
        and lease.policy_version >= query.min_version
        and (lease.max_tokens or 99) >= query.num_tokens
        and replica_id not in query.excluded
        and fleet[replica_id].failing_until <= 0.5
        and fleet[replica_id].rejecting_until <= 0.5
        and fleet[replica_id].num_in_flight < fleet[replica_id].max_in_flight
    }
    pairs = {
        (one, other)
        for one in able
        for other in able
        if (leases[one].role, leases[other].role) == (PREFILL, DECODE)
        and leases[one].state == leases[other].state == READY
        and leases[one].policy_version == leases[other].policy_version
        and leases[one].disaggregation.tensor_parallel == leases[other].disaggregation.tensor_parallel > 0
        and leases[one].disaggregation.transfer_backend == leases[other].disaggregation.transfer_backend
    }
    unified = {each for each in able if leases[each].role == UNIFIED}
    fit = unified | {prefill for prefill, _ in pairs}
    useful = unified | {each for pair in pairs for each in pair}
    assert useful == {each for each in leases if fleet.view.find_reason(fleet[each], query, 0.5) is None}
    if picked is None:
        assert not fit
        why = fleet.view.explain(query, 0.5)
        assert sum(why.reasons.values()) == len(fleet)
        assert str(why)
    elif picked.replica_id not in fit:
        assert (name, picked.replica_id) == (Balancing.AFFINITY, own)  # where the session has begun, beyond the limit
        assert picked.max_in_flight <= picked.num_in_flight < 1.5 * picked.max_running
        raised = dataclasses.replace(picked, max_in_flight=picked.num_in_flight + 1)
        assert fleet.view.is_fit(raised, query, 0.5)
    else:
        if picked.role == PREFILL:
            partner = fleet.view.find_partner(picked, query, 0.5)
            assert partner is not None
            assert (picked.replica_id, partner.replica_id) in pairs
            loads = [fleet[decode].next_load for prefill, decode in pairs if prefill == picked.replica_id]
            assert partner.next_load == min(loads)
        if own in fit and query.session_id and name is Balancing.AFFINITY:
            assert picked.replica_id == own


@given(fleets)
def test_balancing_only_reads_immutable_views(fleet: Fleet) -> None:
    """A status cannot be changed, and choosing and recording leave every one as it was."""
    before = dict(fleet.view.replicas)
    for name in Balancing:
        chosen(make_balancer(name, Tuning()), fleet, Query(session_id="s"))
    assert dict(fleet.view.replicas) == before
    for status in before.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            status.num_in_flight = 1  # type: ignore[misc]


def test_what_a_replica_reports_of_this_routers_own_calls_is_not_counted_twice() -> None:
    """Own calls are known at once; what is reported beyond them are those of others."""
    fleet = Fleet(described("a", in_flight=3))
    fleet.update(replica("a", running=4, queued=1))
    assert fleet["a"].num_elsewhere == 2
    assert fleet["a"].load == 5 / 8
    fleet.set_in_flight("a", 6)
    assert fleet["a"].load == 1.0
    fleet.update(replica("a", running=4))
    assert fleet["a"].load == 6 / 8


def test_round_robin_takes_turns_and_passes_over_the_unfit() -> None:
    """By id, from the start again after the last; loads and sessions do not matter."""
    balancer = make_balancer(Balancing.ROUND_ROBIN, Tuning())
    pool = Fleet(described("c"), described("a", running=7), described("b", state=DRAINING), described("d"))
    assert [chosen(balancer, pool, Query(session_id="s")) for _ in range(7)] == ["a", "c", "d", "a", "c", "d", "a"]
    pool.remove("c")
    assert [chosen(balancer, pool) for _ in range(3)] == ["d", "a", "d"]


@pytest.mark.parametrize(
    ("replicas", "min_version", "reasons", "text"),
    [
        ([], 0, {}, "no replica is registered; start one with `penstock serve rollout`"),
        (
            [described("a", version=3), described("b", version=5)],
            7,
            {UnroutableReason.STALE: 2},
            "all 2 replicas are below policy version 7 (newest 5)",
        ),
        ([described("a", state=DRAINING)], 0, {UnroutableReason.DRAINING: 1}, "the only replica is draining"),
        (
            [described("a", state=DRAINING), described("b", version=1), described("c", version=2, failing=True)],
            2,
            {UnroutableReason.DRAINING: 1, UnroutableReason.STALE: 1, UnroutableReason.FAILING: 1},
            "of 3 replicas 1 draining, 1 below policy version 2 (newest 2), 1 failing or unreachable",
        ),
        (
            [described("a", in_flight=8), described("b", in_flight=9)],
            0,
            {UnroutableReason.FULL: 2},
            "all 2 replicas are at the limit of calls",
        ),
    ],
)
def test_tells_why_there_is_none(
    replicas: list[Described], min_version: int, reasons: dict[UnroutableReason, int], text: str
) -> None:
    """The reason is typed, and its text says what keeps each replica away."""
    why = Fleet(*replicas).view.explain(Query(min_version=min_version), 0.0)
    assert isinstance(why, NoReplica)
    assert why.reasons == reasons
    assert str(why) == text
