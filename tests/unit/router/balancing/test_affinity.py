"""Affinity: a session stays with the replica that has its prefix, and new ones go where the load is least."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.balancing import Query
from services.router.balancing.affinity import AffinityBalancer, Sessions
from tests.support.router.random_fleets import fleets
from tests.support.router.replica_statuses import UPDATING, Fleet, chosen, described


@given(fleets)
def test_affinity_prefers_ready_and_then_the_least_loaded(fleet: Fleet) -> None:
    """Without a session, no fit replica is better than the chosen one: ready before updating, then by load."""
    picked = AffinityBalancer(max_sessions=1).choose(Query(), fleet.view, 0.0)
    fit = [each for each in fleet.view.replicas.values() if fleet.view.is_fit(each, Query(), 0.0)]
    if picked is not None:
        loads = fleet.view.next_loads(fit)
        rank = {each.replica_id: (not each.is_settled, loads[each.replica_id]) for each in fit}
        assert rank[picked.replica_id] == min(rank.values())


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


def test_a_small_replica_takes_none_beyond_its_limit() -> None:
    """A call that queues behind two others may wait for half of a long sample."""
    balancer = AffinityBalancer(max_sessions=10)
    pool = Fleet(described("a", max_running=2, running=1), described("b", max_running=2))
    balancer.record(Query(session_id="g/0", group_id="g"), "a")
    assert chosen(balancer, pool, Query(session_id="g/1", group_id="g")) == "a"
    pool.set_in_flight("a", 2)
    assert chosen(balancer, pool, Query(session_id="g/2", group_id="g")) == "b"


def test_a_session_whose_replica_is_full_moves() -> None:
    """It does not wait for its prefix cache while others stand idle, and stays where it went."""
    balancer = AffinityBalancer(max_sessions=10)
    balancer.record(Query(session_id="s"), "a")
    pool = Fleet(described("a", in_flight=12), described("b"))
    assert chosen(balancer, pool, Query(session_id="s")) == "b"
    pool.set_in_flight("a", 0)
    assert chosen(balancer, pool, Query(session_id="s")) == "b"


def test_a_call_whose_group_has_moved_on_waits_for_its_own_replica() -> None:
    """Not for its home, whose queue it is in; meanwhile either takes it, and beside a free slot it does not wait."""
    balancer = AffinityBalancer(max_sessions=10)
    balancer.record(Query(session_id="g/0", group_id="g"), "own")
    waiting = Query(session_id="g/1", group_id="g", home="home")
    pool = Fleet(described("home", in_flight=12), described("own", in_flight=12), described("other", in_flight=8))
    assert balancer.choose(waiting, pool.view, 0.0) is None
    assert balancer.find_home(waiting, pool.view, 0.0) == ("own", True)
    pool.set_in_flight("home", 11)
    assert chosen(balancer, pool, waiting) == "home"
    pool.set_in_flight("home", 12)
    balancer.record(Query(session_id="g/2", group_id="g"), "own")
    waiting = Query(session_id="g/3", group_id="g", home="home")
    pool.set_in_flight("own", 11)
    assert chosen(balancer, pool, waiting) == "own"
    pool.set_in_flight("own", 12)
    pool.set_in_flight("other", 7)
    assert chosen(balancer, pool, Query(session_id="g/4", group_id="g", home="home")) == "other"


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
