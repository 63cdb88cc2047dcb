"""Notices that SGLang's scheduler hangs: its process lives, and answers nothing.

SGLang's own watchdog is a thread of the scheduler and looks only while a batch is computed, so it sees neither a
process that is stopped nor one that hangs between batches. Without an answer the lease would call such an engine ready
for ever, and each of its calls would wait until its caller gives up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

_LOOK_S: Final = 1.0
_ASK_EVERY_S: Final = 10.0
_SLACK: Final = 2.0


def silence_limit_s(watchdog_timeout: float | None) -> float:
    """Return the seconds of silence that are no hang: more than SGLang's own watchdog, with this timeout, allows a
    batch. Without that watchdog, nothing is a hang."""
    return _SLACK * watchdog_timeout if watchdog_timeout else float("inf")


async def until_it_hangs(
    ask: Callable[[], Awaitable[object]], *, limit_s: float, is_excused: Callable[[], bool]
) -> None:
    """Return when the scheduler hangs.

    Seconds are counted in looks, because a scheduler has not hung if its machine was suspended, or if its process was
    stopped with all its children. Excused looks do not count, and do not start the count anew: a trainer that keeps
    trying to push to a hanging engine would hide it for ever.

    Args:
        ask: Has the scheduler answer a question that it answers between any two batches.
        limit_s: Seconds of silence after which it hangs.
        is_excused: Whether it has a reason to answer nothing now, such as weights that it is loading.
    """
    while True:
        asking = asyncio.ensure_future(ask())
        silent_s = 0.0
        try:
            while not asking.done():
                if silent_s >= limit_s:
                    return
                await asyncio.wait({asking}, timeout=_LOOK_S)
                silent_s += 0.0 if is_excused() else _LOOK_S
        finally:
            asking.cancel()
        asking.result()
        await asyncio.sleep(_ASK_EVERY_S)
