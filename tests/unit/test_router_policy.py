"""The router's choice of a replica."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.v1 import common_pb2
from services.router.policy import Affinity, Candidate, NoReplica, Obstacle, choose, find_obstacle

READY = common_pb2.REPLICA_STATE_READY
UPDATING = common_pb2.REPLICA_STATE_UPDATING
DRAINING = common_pb2.REPLICA_STATE_DRAINING
UNIFIED = common_pb2.REPLICA_ROLE_UNIFIED


def candidate(
    replica_id: str,
    *,
    state: int = READY,
    version: int = 0,
    running: int = 0,
    queued: int = 0,
    max_running: int = 8,
    role: int = UNIFIED,
    in_flight: int = 0,
    reachable: bool = True,
) -> Candidate:
    replica = common_pb2.Replica(
        replica_id=replica_id,
        role=role,
        state=state,
        policy_version=version,
        num_running=running,
        num_queued=queued,
        max_running=max_running,
    )
    return Candidate(replica=replica, num_in_flight=in_flight, reachable=reachable)


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
        in_flight=st.integers(0, 20),
        reachable=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.replica.replica_id,
)


@given(pools, st.integers(0, 6), st.sets(st.sampled_from("abcdefgh")), st.none() | st.sampled_from("abcdefgh"))
def test_never_chooses_what_may_not_be_chosen_and_always_chooses_what_may(
    pool: list[Candidate], min_version: int, excluded: set[str], own: str | None
) -> None:
    """Whatever the pool: a chosen replica has no obstacle, and none is chosen only if every replica has one."""
    affinity = Affinity(10)
    if own is not None:
        affinity.bind("s", own)
    chosen = choose(pool, affinity, session_id="s", min_version=min_version, excluded=excluded)
    fit = {
        each.replica.replica_id
        for each in pool
        if each.replica.state in (READY, UPDATING)
        and each.replica.role == UNIFIED
        and each.replica.policy_version >= min_version
        and each.reachable
        and each.replica.replica_id not in excluded
    }
    if isinstance(chosen, NoReplica):
        assert not fit
        assert sum(chosen.obstacles.values()) == len(pool)
        assert str(chosen)
    else:
        assert chosen in fit
        if own in fit:
            assert chosen == own


@given(pools)
def test_prefers_ready_and_then_the_least_loaded(pool: list[Candidate]) -> None:
    """Without a session, no fit replica is better than the chosen one: ready before updating, then by load."""
    chosen = choose(pool, Affinity(1), session_id="", min_version=0)
    fit = [each for each in pool if find_obstacle(each, 0) is None]
    if isinstance(chosen, str):
        rank = {each.replica.replica_id: (each.replica.state != READY, each.load) for each in fit}
        assert rank[chosen] == min(rank.values())


@given(st.integers(1, 8), st.integers(0, 60))
def test_simultaneous_requests_spread_evenly(num_replicas: int, num_requests: int) -> None:
    """Requests of different sessions that run at once differ by at most one between equal replicas."""
    affinity, in_flight = Affinity(100), collections.Counter[str]()
    for index in range(num_requests):
        pool = [candidate(str(n), in_flight=in_flight[str(n)]) for n in range(num_replicas)]
        chosen = choose(pool, affinity, session_id=f"s{index}", min_version=0)
        assert isinstance(chosen, str)
        affinity.bind(f"s{index}", chosen)
        in_flight[chosen] += 1
    counts = [in_flight[str(n)] for n in range(num_replicas)]
    assert max(counts) - min(counts) <= 1


def test_sessions_between_their_turns_spread_evenly() -> None:
    """Sessions that have no call running now still count: each replica holds as many prefixes as the others."""
    affinity = Affinity(100)
    pool = [candidate("a"), candidate("b"), candidate("c")]
    for index in range(30):
        chosen = choose(pool, affinity, session_id=f"s{index}", min_version=0)
        assert isinstance(chosen, str)
        affinity.bind(f"s{index}", chosen)
    assert [affinity.num_sessions(name) for name in "abc"] == [10, 10, 10]


def test_load_is_relative_to_what_a_replica_can_run() -> None:
    """Four requests on a replica of sixteen weigh less than two on one of four."""
    pool = [candidate("small", running=2, max_running=4), candidate("large", running=3, queued=1, max_running=16)]
    assert choose(pool, Affinity(1), session_id="", min_version=0) == "large"


def test_a_session_stays_even_when_its_replica_is_the_most_loaded_or_updating() -> None:
    """Affinity goes before load, and a push does not move sessions away."""
    affinity = Affinity(10)
    affinity.bind("s", "a")
    pool = [candidate("a", state=UPDATING, running=8), candidate("b")]
    assert choose(pool, affinity, session_id="s", min_version=0) == "a"
    assert choose(pool, affinity, session_id="other", min_version=0) == "b"


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=60), st.integers(1, 6))
def test_affinity_keeps_the_sessions_used_last(uses: list[tuple[int, str]], max_sessions: int) -> None:
    """It remembers exactly the last `max_sessions` different sessions, and counts them by replica."""
    affinity = Affinity(max_sessions)
    for session, replica in uses:
        affinity.bind(str(session), replica)
    kept: dict[int, str] = {}
    for session, replica in reversed(uses):
        if session not in kept and len(kept) < max_sessions:
            kept[session] = replica
    assert len(affinity) == len(kept)
    for session in range(10):
        assert affinity.get(str(session)) == kept.get(session)
    for name in "abc":
        assert affinity.num_sessions(name) == sum(replica == name for replica in kept.values())


def test_an_empty_session_id_binds_nothing() -> None:
    """Requests without a session do not all stick to one replica."""
    affinity = Affinity(10)
    affinity.bind("", "a")
    assert len(affinity) == 0


@pytest.mark.parametrize(
    ("pool", "min_version", "obstacles", "text"),
    [
        ([], 0, {}, "no replica is registered; start one with `penstock serve rollout`"),
        (
            [candidate("a", version=3), candidate("b", version=5)],
            7,
            {Obstacle.STALE: 2},
            "all 2 replicas are below policy version 7 (newest 5)",
        ),
        ([candidate("a", state=DRAINING)], 0, {Obstacle.DRAINING: 1}, "the only replica is draining"),
        (
            [candidate("a", state=DRAINING), candidate("b", version=1), candidate("c", version=2, reachable=False)],
            2,
            {Obstacle.DRAINING: 1, Obstacle.STALE: 1, Obstacle.UNREACHABLE: 1},
            "of 3 replicas 1 draining, 1 below policy version 2 (newest 2), 1 not reachable",
        ),
    ],
)
def test_tells_why_there_is_none(
    pool: list[Candidate], min_version: int, obstacles: dict[Obstacle, int], text: str
) -> None:
    """The reason is typed, and its text says what keeps each replica away."""
    chosen = choose(pool, Affinity(1), session_id="", min_version=min_version)
    assert isinstance(chosen, NoReplica)
    assert chosen.obstacles == obstacles
    assert str(chosen) == text
