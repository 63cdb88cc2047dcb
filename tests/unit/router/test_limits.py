"""How many calls a replica is given at once."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.limits import Limit
from services.router.tuning import LimitTuning

CONFIG = LimitTuning(factor=1.5, kv_high=0.9, queue_high=0.5, increase=0.125, decrease=0.5)


def keep_up(limit: Limit, *, max_running: int = 16, num_reports: int = 1) -> None:
    """The limit is used up and the replica keeps up, `num_reports` times."""
    for _ in range(num_reports):
        limit.use(limit.max_in_flight)
        limit.report(max_running=max_running, num_queued=0, kv_use=0.5)


def test_starts_with_what_the_replica_runs_at_once() -> None:
    """And with one slot if it does not say."""
    assert Limit(CONFIG, 16).max_in_flight == 16
    assert Limit(CONFIG, 0).max_in_flight == 1


def test_grows_by_addition_while_it_is_used_up_to_the_factor() -> None:
    """By an eighth of sixteen each time, until one and a half times sixteen."""
    limit = Limit(CONFIG, 16)
    seen = []
    for _ in range(6):
        keep_up(limit)
        seen.append(limit.max_in_flight)
    assert seen == [18, 20, 22, 24, 24, 24]


def test_does_not_grow_while_it_is_not_reached() -> None:
    """Whether more would be well is not known; a use counts for one report only."""
    limit = Limit(CONFIG, 16)
    limit.use(15)
    limit.report(max_running=16, num_queued=0, kv_use=0.5)
    assert limit.max_in_flight == 16
    keep_up(limit)
    limit.report(max_running=16, num_queued=0, kv_use=0.5)
    assert limit.max_in_flight == 18


def test_shrinks_by_multiplication_when_the_cache_or_the_queue_is_full() -> None:
    """By half each time; at the threshold itself it does not."""
    limit = Limit(CONFIG, 16)
    limit.report(max_running=16, num_queued=8, kv_use=0.9)
    assert limit.max_in_flight == 16
    limit.report(max_running=16, num_queued=0, kv_use=0.91)
    assert limit.max_in_flight == 8
    limit.report(max_running=16, num_queued=9, kv_use=0.1)
    assert limit.max_in_flight == 4


def test_shrinks_when_a_call_is_rejected() -> None:
    """The replica knows better than its last lease."""
    limit = Limit(CONFIG, 16)
    limit.reject()
    assert limit.max_in_flight == 8


def test_never_gets_below_one_and_comes_back() -> None:
    """A replica in trouble keeps one call, which is how it is seen to be well again."""
    limit = Limit(CONFIG, 16)
    for _ in range(20):
        limit.report(max_running=16, num_queued=100, kv_use=1.0)
    assert limit.max_in_flight == 1
    keep_up(limit, num_reports=3)
    assert limit.max_in_flight == 7


def test_follows_a_replica_that_says_it_runs_more() -> None:
    """In proportion."""
    limit = Limit(CONFIG, 16)
    limit.report(max_running=32, num_queued=0, kv_use=0.0)
    assert limit.max_in_flight == 32


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.floats(0, 1), st.integers(0, 100)), max_size=40),
    st.integers(0, 64),
)
def test_stays_between_one_and_the_factor(reports: list[tuple[int, int, float, int]], max_running: int) -> None:
    """Whatever a replica reports."""
    limit = Limit(CONFIG, max_running)
    largest = max(1, max_running)
    for max_running_now, num_queued, kv_use, in_flight in reports:
        limit.use(in_flight)
        limit.report(max_running=max_running_now, num_queued=num_queued, kv_use=kv_use)
        largest = max_running_now or largest
        assert 1 <= limit.max_in_flight <= max(1, 1.5 * largest)


def test_two_routers_come_to_share_a_replica_evenly() -> None:
    """Additive increase and multiplicative decrease: from one having all, both end with about the same."""
    one, other = Limit(CONFIG, 64), Limit(CONFIG, 64)
    for _ in range(5):
        other.report(max_running=64, num_queued=64, kv_use=0.0)
    assert (one.max_in_flight, other.max_in_flight) == (64, 2)
    for _ in range(100):
        one.use(one.max_in_flight)
        other.use(other.max_in_flight)
        num_queued = max(0, one.max_in_flight + other.max_in_flight - 64)
        one.report(max_running=64, num_queued=num_queued, kv_use=0.0)
        other.report(max_running=64, num_queued=num_queued, kv_use=0.0)
    assert abs(one.max_in_flight - other.max_in_flight) <= 2


def test_does_not_grow_in_the_time_in_which_it_turned_a_call_away() -> None:
    """Nor is what was used before it or after it a reason to grow; a time without a refusal is."""
    limit = Limit(CONFIG, 16)
    limit.use(16)
    limit.reject()
    limit.use(8)
    limit.report(max_running=16, num_queued=0, kv_use=0.5)
    assert limit.max_in_flight == 8
    keep_up(limit)
    assert limit.max_in_flight == 10
