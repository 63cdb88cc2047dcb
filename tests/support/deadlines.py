"""Deadlines that end what has begun, however busy the machine is."""

from collections.abc import Awaitable, Callable

from tests.support.waiting import HANG_S


async def long_enough(play: Callable[[float], Awaitable[object]], has_begun: Callable[[], object]) -> float:
    """Play within a second, then within twice the time and so on, until it `has_begun` before its time was up.

    Returns:
        The seconds of the last play.

    Raises:
        TimeoutError: it never begins.
    """
    timeout_s = 1.0
    while timeout_s <= HANG_S:
        await play(timeout_s)
        if has_begun():
            return timeout_s
        timeout_s *= 2
    raise TimeoutError(f"nothing has begun within {timeout_s / 2:g} s")
