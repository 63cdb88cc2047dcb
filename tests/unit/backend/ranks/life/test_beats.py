"""What rank 0 concludes from the beats of all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.errors import DataError
from services.trainer.backend.ranks.beats import Beat, BeatWatch, Pulse


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def problems(seconds: int, *beats: Beat, cpu_of: tuple[float, ...] = (), before: int = 300) -> list[str]:
    """What is said in each second in which the ranks say these, after a time between two commands.

    `cpu_of` are the shares of a core that they use.
    """
    clock = Clock()
    watch = BeatWatch(stall_s=60.0, now=clock)
    shares = cpu_of or (0.001,) * len(beats)
    said = []
    for second in range(before + seconds):
        clock.now_s += 1.0
        for rank, beat in enumerate(beats):
            now = beat if second >= before else Beat(command=6)
            fields = {name: getattr(now, name) for name in Beat.__slots__}
            watch.hear(rank, Beat(**fields | {"cpu_s": second * shares[rank]}))
        said.append(watch.problem())
    assert not any(said[:before])
    return said[before:]


def running(collectives: int) -> Beat:
    """Of a rank within its seventh command."""
    return Beat(command=7, name="finish_step", is_done=False, collectives=collectives)


DONE = Beat(command=7, name="finish_step")
REFUSED = Beat(command=7, name="finish_step", num_refused=1, last_refused=7, reason="finish_step: it is odd")


def test_a_rank_that_others_wait_for_must_move() -> None:
    """One that has entered fewer collectives, or has not begun, or does not come to the end; not while it computes."""
    expected = "rank 1 did not move for 60 s while others waited in the command finish_step"
    for others, behind in ((running(5), running(4)), (running(0), Beat(command=6)), (DONE, running(9))):
        said = problems(70, others, behind, others)
        assert said[:60] == [""] * 60
        assert said[60:] == [expected] * 10
        assert problems(70, others, behind, others, cpu_of=(0.0, 0.02, 0.0)) == [""] * 70
    both = problems(61, running(5), running(4), running(4))[-1]
    assert both.startswith("ranks 1, 2 did not move")
    assert problems(99, running(5), running(4), running(4), cpu_of=(0.0, 0.0, 0.02)) == [""] * 99


def test_ranks_at_one_place_are_left_alone() -> None:
    """Between two commands nothing moves for as long as a rollout takes; in a collective, torch's own limit holds."""
    assert problems(9999, DONE, DONE) == [""] * 9999
    assert problems(999, running(5), running(5)) == [""] * 999


def test_what_all_refuse_is_for_rank_0() -> None:
    """Whatever it does next."""
    assert problems(99, REFUSED, REFUSED, REFUSED) == [""] * 99
    next_one = Beat(command=8, name="abort_step", num_refused=1, last_refused=7, reason="finish_step: it is odd")
    assert problems(3, next_one, REFUSED) == [""] * 3


def test_what_one_refuses_alone_is_a_problem() -> None:
    """At once where rank 0 goes on, and in seconds where it waits."""
    expected = "rank 1 alone refused the command finish_step: it is odd"
    for own in (DONE, Beat(command=8, name="digests", is_done=False)):
        assert problems(3, own, REFUSED) == [expected] * 3
    waiting = problems(15, running(5), REFUSED)
    assert waiting[:10] == [""] * 10
    assert waiting[10:] == [expected] * 5
    assert problems(15, running(5), REFUSED, cpu_of=(0.5, 0.0)) == [""] * 15


@contextmanager
def refusing() -> Iterator[None]:
    with pytest.raises(DataError):
        yield


def test_a_pulse_tells_what_its_rank_is_at() -> None:
    """The command, the collectives since it began, and what was refused; it arrives as it was sent."""
    pulse, entered = Pulse(), 3
    pulse.count_collectives = lambda: entered
    with pulse.command("load"):
        entered = 5
        beat = pulse.beat()
        assert (beat.command, beat.name, beat.is_done, beat.collectives) == (1, "load", False, 2)
        assert beat.cpu_s > 0
        assert Beat.decode(beat.encode()) == beat
    with refusing(), pulse.command("accumulate"):
        raise DataError("x" * 9000)
    with pulse.command("abort_step"):
        pass
    beat = pulse.beat()
    assert (beat.command, beat.name, beat.is_done) == (3, "abort_step", True)
    assert (beat.num_refused, beat.last_refused, len(beat.reason)) == (1, 2, 4000)
    assert beat.reason.startswith("accumulate: xxx")
