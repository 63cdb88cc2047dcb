"""The router's choice of a replica."""

import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.v1 import common_pb2
from services.router.balancing import (
    NoReplica,
    Query,
    ReplicaStatus,
    UnroutableReason,
    hash_blocks,
    make_balancer,
)
from services.router.balancing.affinity import AffinityBalancer, Sessions
from services.router.balancing.pool_view import is_overloaded
from services.router.config import Balancing
from services.router.tuning import Tuning
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

fleets = st.lists(
    st.builds(
        described,
        st.sampled_from("abcdefgh"),
        state=st.sampled_from(common_pb2.ReplicaState.values()),
        version=st.integers(0, 5),
        running=st.integers(0, 20),
        queued=st.integers(0, 20),
        max_running=st.integers(0, 16),
        role=st.sampled_from(common_pb2.ReplicaRole.values()),
        backend=st.sampled_from(["mooncake", "mooncake", "nixl", ""]),
        tensor_parallel=st.sampled_from([1, 1, 2]),
        max_tokens=st.sampled_from([0, 10, 20]),
        in_flight=st.integers(0, 20),
        failing=st.booleans(),
        rejecting=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.lease.replica_id,
).map(lambda replicas: Fleet(*replicas))

queries = st.builds(
    Query,
    session_id=st.sampled_from(["", "s", "t"]),
    min_version=st.integers(0, 6),
    excluded=st.frozensets(st.sampled_from("abcdefgh")),
    blocks=st.tuples(st.integers(0, 3)),
    num_tokens=st.sampled_from([0, 10, 11, 21]),
)


@pytest.mark.parametrize("name", Balancing)
@settings(deadline=None)  # the machine may be busy
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


@settings(deadline=None)  # the machine may be busy
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


@settings(deadline=None)  # the machine may be busy
@given(fleets)
def test_affinity_prefers_ready_and_then_the_least_loaded(fleet: Fleet) -> None:
    """Without a session, no fit replica is better than the chosen one: ready before updating, then by load."""
    picked = AffinityBalancer(max_sessions=1).choose(Query(), fleet.view, 0.0)
    fit = [each for each in fleet.view.replicas.values() if fleet.view.is_fit(each, Query(), 0.0)]
    if picked is not None:
        rank = {each.replica_id: (not each.is_settled, fleet.view.next_load(each)) for each in fit}
        assert rank[picked.replica_id] == min(rank.values())


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 8), st.integers(0, 60))
def test_simultaneous_calls_spread_evenly(num_replicas: int, num_calls: int) -> None:
    """Calls of different sessions that run at once differ by at most one between equal replicas."""
    balancer = AffinityBalancer(max_sessions=100)
    pool = Fleet(*(described(str(n), max_running=64) for n in range(num_replicas)))
    for index in range(num_calls):
        name = chosen(balancer, pool, Query(session_id=f"s{index}"))
        assert name is not None
        pool.set_in_flight(name, pool[name].num_in_flight + 1)
    counts = [each.num_in_flight for each in pool.view.replicas.values()]
    assert max(counts) - min(counts) <= 1


def test_sessions_between_their_turns_spread_evenly() -> None:
    """Sessions that have no call running now still count: each replica holds as many prefixes as the others."""
    balancer = AffinityBalancer(max_sessions=100)
    pool = Fleet(described("a"), described("b"), described("c"))
    for index in range(30):
        assert chosen(balancer, pool, Query(session_id=f"s{index}"))
    assert [balancer.sessions.num_of(name) for name in "abc"] == [10, 10, 10]


def test_load_is_relative_to_what_a_replica_can_run() -> None:
    """Two requests on a replica of four weigh more than four on one of sixteen."""
    pool = Fleet(described("small", running=2, max_running=4), described("large", running=3, queued=1, max_running=16))
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "large"


def test_a_call_goes_where_it_weighs_least() -> None:
    """An idle replica of four has a quarter of its slots taken with it, a busier one of sixteen an eighth."""
    pool = Fleet(described("small", running=0, max_running=4), described("large", running=1, max_running=16))
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "large"


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


def test_a_session_stays_even_when_its_replica_is_the_most_loaded_or_updating() -> None:
    """Affinity goes before load, and a push does not move sessions away."""
    balancer = AffinityBalancer(max_sessions=10)
    balancer.record(Query(session_id="s"), "a")
    pool = Fleet(described("a", state=UPDATING, running=8), described("b"))
    assert chosen(balancer, pool, Query(session_id="s")) == "a"
    assert chosen(balancer, pool, Query(session_id="other")) == "b"


def test_new_sessions_of_a_group_go_where_its_prompt_was_computed() -> None:
    """Whatever the load; a session that began elsewhere stays there, and one that had to move takes the next along."""
    balancer = AffinityBalancer(max_sessions=10)
    pool = Fleet(described("a", running=6), described("b"))
    balancer.record(Query(session_id="g/0", group_id="g"), "a")
    balancer.record(Query(session_id="h/0", group_id="h"), "b")
    assert chosen(balancer, pool, Query(session_id="g/1", group_id="g")) == "a"
    assert chosen(balancer, pool, Query(session_id="h/1", group_id="h")) == "b"
    assert chosen(balancer, pool, Query(session_id="i/0", group_id="i")) == "b"
    pool.set_in_flight("a", 11)  # beyond its limit of 8
    assert chosen(balancer, pool, Query(session_id="g/2", group_id="g")) == "a"
    pool.set_in_flight("a", 12)
    assert chosen(balancer, pool, Query(session_id="g/3", group_id="g")) == "b"
    pool.set_in_flight("a", 0)
    assert chosen(balancer, pool, Query(session_id="g/4", group_id="g")) == "b"
    assert chosen(balancer, pool, Query(session_id="g/0", group_id="g")) == "a"


def test_consistent_hashing_keeps_a_group_together() -> None:
    """All routers agree on its replica without asking each other."""
    pool = Fleet(*(described(name) for name in "abcdefgh"))
    balancer = make_balancer(Balancing.CONSISTENT_HASH, Tuning())
    chosen_for = {chosen(balancer, pool, Query(session_id=f"g/{number}", group_id="g")) for number in range(20)}
    assert len(chosen_for) == 1


def test_a_session_whose_replica_is_full_moves() -> None:
    """It does not wait for its prefix cache while others stand idle, and stays where it went."""
    balancer = AffinityBalancer(max_sessions=10)
    balancer.record(Query(session_id="s"), "a")
    pool = Fleet(described("a", in_flight=12), described("b"))
    assert chosen(balancer, pool, Query(session_id="s")) == "b"
    pool.set_in_flight("a", 0)
    assert chosen(balancer, pool, Query(session_id="s")) == "b"


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=60), st.integers(1, 6))
def test_sessions_used_last_are_kept(uses: list[tuple[int, str]], max_sessions: int) -> None:
    """Exactly the last `max_sessions` different sessions are remembered, and counted by replica."""
    sessions = Sessions(max_sessions)
    for session, name in uses:
        sessions.bind(str(session), name)
    kept: dict[int, str] = {}
    for session, name in reversed(uses):
        if session not in kept and len(kept) < max_sessions:
            kept[session] = name
    assert len(sessions) == len(kept)
    for session in range(10):
        assert sessions.get(str(session)) == kept.get(session)
    for name in "abc":
        assert sessions.num_of(name) == sum(each == name for each in kept.values())


def test_an_empty_session_id_binds_nothing() -> None:
    """Calls without a session do not all stick to one replica."""
    sessions = Sessions(10)
    sessions.bind("", "a")
    assert len(sessions) == 0


def test_round_robin_takes_turns_and_passes_over_the_unfit() -> None:
    """By id, from the start again after the last; loads and sessions do not matter."""
    balancer = make_balancer(Balancing.ROUND_ROBIN, Tuning())
    pool = Fleet(described("c"), described("a", running=7), described("b", state=DRAINING), described("d"))
    assert [chosen(balancer, pool, Query(session_id="s")) for _ in range(7)] == ["a", "c", "d", "a", "c", "d", "a"]
    pool.remove("c")
    assert [chosen(balancer, pool) for _ in range(3)] == ["d", "a", "d"]


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


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 16)), min_size=1, max_size=8), st.floats(1.0, 3.0))
def test_never_are_all_overloaded(loads: list[tuple[int, int]], ratio: float) -> None:
    """Whatever runs, one replica at least may have one call more."""
    fit = [
        ReplicaStatus(replica_id=str(n), num_in_flight=calls, max_running=slots)
        for n, (calls, slots) in enumerate(loads)
    ]
    assert not all(is_overloaded(each, fit, ratio + 1e-9) for each in fit)


def test_prefix_sends_a_prompt_where_its_beginning_is() -> None:
    """The longest known beginning counts; a prompt that nobody had goes to the least loaded."""
    balancer = make_balancer(Balancing.PREFIX, Tuning())
    pool = Fleet(described("a"), described("b", running=1), described("c", running=2))
    system, question = [1] * 128, [2] * 64
    balancer.record(Query(blocks=hash_blocks(system)), "c")
    balancer.record(Query(blocks=hash_blocks(system + question)), "b")
    assert chosen(balancer, pool, Query(blocks=hash_blocks(system + question + [3] * 64))) == "b"
    pool.set_in_flight("b", 8)
    assert chosen(balancer, pool, Query(blocks=hash_blocks([9] * 64))) == "a"


def test_prefix_leaves_a_replica_that_has_too_much() -> None:
    """The cache is worth some load, not any: here up to 1.25 times the least, and a quarter of the slots."""
    balancer = make_balancer(Balancing.PREFIX, Tuning())
    pool = Fleet(described("a", max_running=8), described("b", max_running=8))
    query = Query(blocks=hash_blocks([1] * 64))
    balancer.record(query, "a")
    pool.set_in_flight("a", 2)
    assert chosen(balancer, pool, query) == "a"
    pool.set_in_flight("a", 3)
    assert chosen(balancer, pool, query) == "b"


def test_prefix_remembers_so_many_blocks() -> None:
    """The blocks unused for longest are forgotten."""
    balancer = make_balancer(Balancing.PREFIX, Tuning(max_prefix_blocks=2))
    pool = Fleet(described("a"), described("b", running=1))
    queries = [Query(blocks=hash_blocks([number] * 64)) for number in range(3)]
    for query in queries:
        balancer.record(query, "b")
    assert [chosen(balancer, pool, query) for query in queries[1:]] == ["b", "b"]
    assert chosen(balancer, pool, queries[0]) == "a"


def test_blocks_stand_for_all_that_comes_before_them() -> None:
    """Whole blocks only; an equal block after another beginning, or below another image, is another."""
    ids = list(range(200))
    blocks = hash_blocks(ids)
    assert len(blocks) == 3
    assert hash_blocks(ids[:191]) == blocks[:2]
    assert hash_blocks(ids[:128] + [7] * 72)[:2] == blocks[:2]
    assert not set(hash_blocks([5, *ids[1:]])) & set(blocks)
    assert not set(hash_blocks(ids, [b"one"])) & set(hash_blocks(ids, [b"two"]))
    assert hash_blocks(ids, [b"one"])[:3] == hash_blocks(ids, [b"one", b"two"])[:3]


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
