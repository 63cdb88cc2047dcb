"""How far a host's clock is from the launcher's, and what that means for the run. Pure."""

from services.doctor.hosts.comparison import BROKEN_CLOCK_S, MAX_CLOCK_S


def ahead_s(clock: float, *, asked_at: float, answered_at: float) -> float:
    """Return by how many seconds, at the least, a host's clock is ahead of the launcher's; negative: behind.

    Args:
        clock: What the host's clock said at some moment between question and answer.
        asked_at: What the launcher's said when it asked.
        answered_at: What it said when the answer came.
    """
    return max(clock - answered_at, 0.0) + min(clock - asked_at, 0.0)


def is_broken(ahead_s: float) -> bool:
    """Return whether the host must be left out."""
    return abs(ahead_s) > BROKEN_CLOCK_S


def describe(ahead_s: float) -> str:
    """Return what a person should know and do; empty if the clocks are near enough."""
    if abs(ahead_s) <= MAX_CLOCK_S:
        return ""
    return (
        f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the one here; have both hosts "
        "synchronise their clocks: look at `timedatectl` and `chronyc tracking`"
    )
