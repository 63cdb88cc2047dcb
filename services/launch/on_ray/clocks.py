"""What it means for the run if a host's clock differs from the launcher's. Pure."""

from services.doctor.hosts.comparison import BROKEN_CLOCK_S, MAX_CLOCK_S


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
