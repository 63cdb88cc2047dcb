"""When a replica that fails is given calls again."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.slots.breaker import Breaker, BreakerState
from services.router.tuning import BreakerTuning

CONFIG = BreakerTuning(failures=3, open_s=1.0, max_open_s=5.0)


def opened(at: float = 0.0) -> Breaker:
    """A breaker that an unreachable replica opened."""
    breaker = Breaker(CONFIG)
    breaker.fail(at, probe=breaker.begin(0.0), unreachable=True)
    return breaker


def test_opens_after_so_many_failures_with_no_success_between() -> None:
    """Two failures, a success, two failures: closed. A third: open."""
    breaker = Breaker(CONFIG)
    for failed in (True, True, False, True, True):
        probe = breaker.begin(0.0)
        if failed:
            breaker.fail(0.0, probe=probe)
        else:
            breaker.succeed(probe=probe)
        assert breaker.state is BreakerState.CLOSED
    breaker.fail(0.0, probe=breaker.begin(0.0))
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0.99)


def test_opens_at_once_when_there_is_no_connection() -> None:
    """Nothing can be expected of the second try."""
    assert opened().state is BreakerState.OPEN


def test_one_probe_decides() -> None:
    """When the time has passed exactly one call may begin; its success closes the breaker."""
    breaker = opened()
    assert breaker.allows(1.0)
    assert breaker.begin(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(1.0)
    breaker.succeed(probe=True)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(1.0)


def test_each_failed_probe_doubles_the_time_up_to_the_longest() -> None:
    """1, 2, 4, 5, 5 seconds; after a success it is 1 again."""
    breaker, now, waits = opened(), 0.0, []
    for _ in range(5):
        waited = next(tenths for tenths in range(1, 100) if breaker.allows(now + tenths / 10)) / 10
        waits.append(waited)
        now += waited
        breaker.fail(now, probe=breaker.begin(now))
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.begin(now)
    breaker.succeed(probe=True)
    breaker.fail(now, probe=breaker.begin(now), unreachable=True)
    assert not breaker.allows(now + 0.99)
    assert breaker.allows(now + 1.0)


def test_a_probe_whose_caller_went_away_is_taken_over() -> None:
    """It revealed nothing: the next call is the probe, without another wait."""
    breaker = opened()
    breaker.abandon(probe=breaker.begin(0.0))
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows(1.0)


def test_a_probe_that_tells_nothing_keeps_others_away_only_for_a_while() -> None:
    """Its caller may have all the time in the world. What it reveals later still counts."""
    breaker = opened()
    assert breaker.begin(1.0)
    assert not breaker.allows(1.9)
    assert breaker.allows(2.0)
    assert breaker.begin(2.0)
    assert not breaker.allows(2.9)
    breaker.succeed(probe=True)
    assert breaker.state is BreakerState.CLOSED


def test_calls_that_began_before_it_opened_change_nothing() -> None:
    """A hundred calls that fail together count as one; a late success says nothing about now."""
    breaker = opened(at=10.0)
    for _ in range(100):
        breaker.fail(10.5, probe=False)
    assert breaker.allows(11.0)
    breaker.succeed(probe=False)
    assert breaker.state is BreakerState.OPEN


@given(st.lists(st.sampled_from(["succeed", "fail", "abandon", "tick"]), max_size=60))
def test_whatever_happens_there_is_one_probe_at_a_time_and_always_a_way_back(events: list[str]) -> None:
    """Calls run one at a time, or two where the breaker lets them; a second probe only where the first says nothing."""
    breaker, now, waits_until = Breaker(CONFIG), 0.0, 0.0
    running: list[bool] = []
    for event in events:
        now += 0.5
        if breaker.allows(now) and len(running) < 2:
            running.append(breaker.begin(now))
            if running[-1]:
                assert now >= waits_until
                waits_until = now + CONFIG.open_s
        if event != "tick" and running:
            probe, waits_until = running.pop(0), 0.0
            if event == "fail":
                breaker.fail(now, probe=probe)
            else:
                getattr(breaker, event)(probe=probe)
    for probe in running:
        breaker.abandon(probe=probe)
    assert breaker.allows(now + CONFIG.max_open_s)
