"""Memory that the C library keeps after a burst of items, given back while the service rests.

Messages and texts come and go by the megabyte, and what is left between them keeps whole pages: of a process of 60 MB,
9 MB after a day's worth of items, all of it free and none of it used again for anything but the next burst.
"""

import asyncio
import ctypes
from collections.abc import Callable

from services.reward.places import Places

_INTERVAL_S = 1.0


def find_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`, which gives back every free page of every arena; other C libraries have none."""
    try:
        return ctypes.CDLL(None).malloc_trim  # called with the interpreter lock released
    except AttributeError:
        return None


async def trim_at_rest(places: Places) -> None:
    """Once after each burst of items, when none is left in the service, give free memory back; until cancelled.

    It takes milliseconds, in which a call that comes just then waits.
    """
    trim = find_trim()
    num_served = places.num_served
    while trim is not None:
        await asyncio.sleep(_INTERVAL_S)
        if places.num_taken == 0 and places.num_served != num_served:
            num_served = places.num_served
            trim(0)
