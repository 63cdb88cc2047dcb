"""The router's choice of a replica."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.v1 import common_pb2
from services.router.balancing import (
    NoReplica,
    Query,
    ReplicaStatus,
    UnroutableReason,
    explain,
    find_reason,
    hash_blocks,
    make_balancer,
)
from services.router.balancing.affinity import AffinityBalancer, Sessions
from services.router.balancing.balancer import is_overloaded
from services.router.config import BalancingName, RouterConfig
from tests.replica_statuses import (
    DECODE,
    DRAINING,
    PREFILL,
    READY,
    UNIFIED,
    UPDATING,
    Pool,
    candidate,
    chosen,
    pool_of,
    replica,
)

pools = st.lists(
    st.builds(
        candidate,
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
        refusing=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.replica_id,
).map(lambda candidates: pool_of(*candidates))

queries = st.builds(
    Query,
    session_id=st.sampled_from(["", "s", "t"]),
    min_version=st.integers(0, 6),
    excluded=st.frozensets(st.sampled_from("abcdefgh")),
    blocks=st.tuples(st.integers(0, 3)),
    num_tokens=st.sampled_from([0, 10, 11, 21]),
)


@pytest.mark.parametrize("name", BalancingName)
@settings(deadline=None)  # the machine may be busy
@given(pools, queries, st.none() | st.sampled_from("abcdefgh"))
def test_never_chooses_what_may_not_be_chosen_and_always_chooses_what_may(
    name: BalancingName, pool: Pool, query: Query, own: str | None
) -> None:
    """Whatever the pool and the policy: who is chosen has no obstacle, and none is chosen only if all have one."""
    policy = make_balancer(RouterConfig(balancing=name))
    if own is not None:
        policy.record(query, own)
    picked = policy.choose(query, pool, 0.5)
    able = {
        each.replica_id
        for each in pool.values()
        if each.replica.state in (READY, UPDATING)
        and each.replica.policy_version >= query.min_version
        and (each.replica.max_tokens or 99) >= query.num_tokens
        and each.replica_id not in query.excluded
        and each.breaker.allows(0.5)
        and each.refusing_until <= 0.5
        and each.num_in_flight < each.limit.max_in_flight
    }
    pairs = {
        (one.replica_id, other.replica_id)
        for one in pool.values()
        for other in pool.values()
        if (one.replica.role, other.replica.role) == (PREFILL, DECODE)
        and {one.replica_id, other.replica_id} <= able
        and one.replica.state == other.replica.state == READY
        and one.replica.policy_version == other.replica.policy_version
        and one.replica.disaggregation.tensor_parallel == other.replica.disaggregation.tensor_parallel > 0
        and one.replica.disaggregation.transfer_backend == other.replica.disaggregation.transfer_backend
    }
    unified = {name for name in able if pool[name].replica.role == UNIFIED}
    fit = unified | {prefill for prefill, _ in pairs}
    useful = unified | {name for pair in pairs for name in pair}
    assert useful == {name for name, each in pool.items() if find_reason(each, query, 0.5) is None}
    if picked is None:
        assert not fit
        why = explain(pool.values(), query, 0.5)
        assert sum(why.reasons.values()) == len(pool)
        assert str(why)
    else:
        assert picked.replica_id in fit
        if picked.replica.role == PREFILL:
            partner = picked.find_partner(query, 0.5)
            assert partner is not None
            assert (picked.replica_id, partner.replica_id) in pairs
            able = [pool[decode] for prefill, decode in pairs if prefill == picked.replica_id]
            next_load, least = (
                min(each.own_load + 1 / each.num_places for each in those) for those in ([partner], able)
            )
            assert next_load == least
        if own in fit and query.session_id and name is BalancingName.AFFINITY:
            assert picked.replica_id == own


@settings(deadline=None)  # the machine may be busy
@given(pools)
def test_affinity_prefers_ready_and_then_the_least_loaded(pool: Pool) -> None:
    """Without a session, no fit replica is better than the chosen one: ready before updating, then by load."""
    picked = AffinityBalancer(max_sessions=1).choose(Query(), pool, 0.0)
    fit = [each for each in pool.values() if each.is_fit(Query(), 0.0)]
    if picked is not None:
        rank = {each.replica_id: (each.replica.state != READY, each.next_load) for each in fit}
        assert rank[picked.replica_id] == min(rank.values())


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 8), st.integers(0, 60))
def test_simultaneous_calls_spread_evenly(num_replicas: int, num_calls: int) -> None:
    """Calls of different sessions that run at once differ by at most one between equal replicas."""
    policy = AffinityBalancer(max_sessions=100)
    pool = pool_of(*(candidate(str(n), max_running=64) for n in range(num_replicas)))
    for index in range(num_calls):
        name = chosen(policy, pool, Query(session_id=f"s{index}"))
        assert name is not None
        pool[name].num_in_flight += 1
    counts = [each.num_in_flight for each in pool.values()]
    assert max(counts) - min(counts) <= 1


def test_sessions_between_their_turns_spread_evenly() -> None:
    """Sessions that have no call running now still count: each replica holds as many prefixes as the others."""
    policy = AffinityBalancer(max_sessions=100)
    pool = pool_of(candidate("a"), candidate("b"), candidate("c"))
    for index in range(30):
        assert chosen(policy, pool, Query(session_id=f"s{index}"))
    assert [policy.sessions.num_of(name) for name in "abc"] == [10, 10, 10]


def test_load_is_relative_to_what_a_replica_can_run() -> None:
    """Two requests on a replica of four weigh more than four on one of sixteen."""
    pool = pool_of(
        candidate("small", running=2, max_running=4), candidate("large", running=3, queued=1, max_running=16)
    )
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "large"


def test_a_call_goes_where_it_weighs_least() -> None:
    """An idle replica of four has a quarter of its places taken with it, a busier one of sixteen an eighth."""
    pool = pool_of(candidate("small", running=0, max_running=4), candidate("large", running=1, max_running=16))
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "large"


def test_what_a_replica_reports_of_this_routers_own_calls_is_not_counted_twice() -> None:
    """Own calls are known at once; what is reported beyond them are those of others."""
    one = candidate("a")
    one.num_in_flight = 3
    one.update(replica(running=4, queued=1))
    assert one.num_elsewhere == 2
    assert one.load == 5 / 8
    one.num_in_flight = 6
    assert one.load == 1.0
    one.update(replica(running=4))
    assert one.load == 6 / 8


def test_a_session_stays_even_when_its_replica_is_the_most_loaded_or_updating() -> None:
    """Affinity goes before load, and a push does not move sessions away."""
    policy = AffinityBalancer(max_sessions=10)
    policy.record(Query(session_id="s"), "a")
    pool = pool_of(candidate("a", state=UPDATING, running=8), candidate("b"))
    assert chosen(policy, pool, Query(session_id="s")) == "a"
    assert chosen(policy, pool, Query(session_id="other")) == "b"


def test_a_session_whose_replica_is_full_moves() -> None:
    """It does not wait for its prefix cache while others stand idle, and stays where it went."""
    policy = AffinityBalancer(max_sessions=10)
    policy.record(Query(session_id="s"), "a")
    pool = pool_of(candidate("a", in_flight=8), candidate("b"))
    assert chosen(policy, pool, Query(session_id="s")) == "b"
    pool["a"].num_in_flight = 0
    assert chosen(policy, pool, Query(session_id="s")) == "b"


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
    policy = make_balancer(RouterConfig(balancing=BalancingName.ROUND_ROBIN))
    pool = pool_of(candidate("c"), candidate("a", running=7), candidate("b", state=DRAINING), candidate("d"))
    assert [chosen(policy, pool, Query(session_id="s")) for _ in range(7)] == ["a", "c", "d", "a", "c", "d", "a"]
    del pool["c"]
    assert [chosen(policy, pool) for _ in range(3)] == ["d", "a", "d"]


def test_consistent_hash_is_the_same_for_two_routers_and_moves_only_what_it_must() -> None:
    """A replica that joins takes its share of the sessions; all others stay. One that leaves gives up only its own."""
    one, other = (make_balancer(RouterConfig(balancing=BalancingName.CONSISTENT_HASH)) for _ in range(2))
    pool = pool_of(*(candidate(f"r{index}") for index in range(7)))
    queries = [Query(session_id=f"session-{index}") for index in range(800)]
    before = [chosen(one, pool, query) for query in queries]
    assert [chosen(other, dict(reversed(pool.items())), query) for query in queries] == before
    assert all(60 < count < 170 for count in collections.Counter(before).values())  # 114 each would be even
    pool["r7"] = candidate("r7")
    after = [chosen(one, pool, query) for query in queries]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"r7"}
    assert 50 < len(moved) < 150  # a hundred would be even
    del pool["r7"]
    assert [chosen(one, pool, query) for query in queries] == before


def test_consistent_hash_gives_larger_replicas_more() -> None:
    """Shares are as places: here one to three."""
    policy = make_balancer(RouterConfig(balancing=BalancingName.CONSISTENT_HASH))
    pool = pool_of(candidate("small", max_running=8), candidate("large", max_running=24))
    counts = collections.Counter(chosen(policy, pool, Query(session_id=str(index))) for index in range(1000))
    assert 200 < counts["small"] < 300


def test_consistent_hash_bounds_the_load() -> None:
    """A session that all calls share does not bury one replica: no load gets above the ratio times the mean."""
    policy = make_balancer(RouterConfig(balancing=BalancingName.CONSISTENT_HASH, max_load_ratio=1.5))
    pool = pool_of(*(candidate(f"r{index}", max_running=100) for index in range(4)))
    for num_calls in range(1, 101):
        name = chosen(policy, pool, Query(session_id="s"))
        assert name is not None
        pool[name].num_in_flight += 1
        assert pool[name].num_in_flight <= 1.5 * num_calls / 4 + 1
    assert max(each.num_in_flight for each in pool.values()) > 30


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 16)), min_size=1, max_size=8), st.floats(1.0, 3.0))
def test_never_are_all_overloaded(loads: list[tuple[int, int]], ratio: float) -> None:
    """Whatever runs, one replica at least may have one call more."""
    fit = [candidate(str(n), in_flight=calls, max_running=places) for n, (calls, places) in enumerate(loads)]
    assert not all(is_overloaded(each, fit, ratio + 1e-9) for each in fit)


def test_prefix_sends_a_prompt_where_its_beginning_is() -> None:
    """The longest known beginning counts; a prompt that nobody had goes to the least loaded."""
    policy = make_balancer(RouterConfig(balancing=BalancingName.PREFIX))
    pool = pool_of(candidate("a"), candidate("b", running=1), candidate("c", running=2))
    system, question = [1] * 128, [2] * 64
    policy.record(Query(blocks=hash_blocks(system)), "c")
    policy.record(Query(blocks=hash_blocks(system + question)), "b")
    assert chosen(policy, pool, Query(blocks=hash_blocks(system + question + [3] * 64))) == "b"
    pool["b"].num_in_flight = 8
    assert chosen(policy, pool, Query(blocks=hash_blocks([9] * 64))) == "a"


def test_prefix_leaves_a_replica_that_has_too_much() -> None:
    """The cache is worth some load, not any: here up to 1.25 times the least, and a quarter of the places."""
    policy = make_balancer(RouterConfig(balancing=BalancingName.PREFIX))
    pool = pool_of(candidate("a", max_running=8), candidate("b", max_running=8))
    query = Query(blocks=hash_blocks([1] * 64))
    policy.record(query, "a")
    pool["a"].num_in_flight = 2
    assert chosen(policy, pool, query) == "a"
    pool["a"].num_in_flight = 3
    assert chosen(policy, pool, query) == "b"


def test_prefix_remembers_so_many_blocks() -> None:
    """The blocks unused for longest are forgotten."""
    policy = make_balancer(RouterConfig(balancing=BalancingName.PREFIX, max_prefix_blocks=2))
    pool = pool_of(candidate("a"), candidate("b", running=1))
    queries = [Query(blocks=hash_blocks([number] * 64)) for number in range(3)]
    for query in queries:
        policy.record(query, "b")
    assert [chosen(policy, pool, query) for query in queries[1:]] == ["b", "b"]
    assert chosen(policy, pool, queries[0]) == "a"


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
    ("candidates", "min_version", "reasons", "text"),
    [
        ([], 0, {}, "no replica is registered; start one with `penstock serve rollout`"),
        (
            [candidate("a", version=3), candidate("b", version=5)],
            7,
            {UnroutableReason.STALE: 2},
            "all 2 replicas are below policy version 7 (newest 5)",
        ),
        ([candidate("a", state=DRAINING)], 0, {UnroutableReason.DRAINING: 1}, "the only replica is draining"),
        (
            [candidate("a", state=DRAINING), candidate("b", version=1), candidate("c", version=2, failing=True)],
            2,
            {UnroutableReason.DRAINING: 1, UnroutableReason.STALE: 1, UnroutableReason.FAILING: 1},
            "of 3 replicas 1 draining, 1 below policy version 2 (newest 2), 1 failing or not reachable",
        ),
        (
            [candidate("a", in_flight=8), candidate("b", in_flight=9)],
            0,
            {UnroutableReason.FULL: 2},
            "all 2 replicas are at the limit of calls",
        ),
    ],
)
def test_tells_why_there_is_none(
    candidates: list[ReplicaStatus], min_version: int, reasons: dict[UnroutableReason, int], text: str
) -> None:
    """The reason is typed, and its text says what keeps each replica away."""
    why = explain(candidates, Query(min_version=min_version), 0.0)
    assert isinstance(why, NoReplica)
    assert why.reasons == reasons
    assert str(why) == text
