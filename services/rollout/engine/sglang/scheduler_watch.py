"""Notices that SGLang's scheduler hangs: its process lives, and answers nothing.

SGLang's own watchdog is a thread of the scheduler and looks only while a batch is computed, so it sees neither a
process that is stopped nor one that hangs between batches. Without an answer the lease would call such an engine ready
for ever, and each of its calls would wait until its caller gives up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

MAX_SILENT_LOOKS: Final = 300
"""Looks in a row without an answer; as many seconds as SGLang lets a batch take. They are counted, because a machine
that was suspended, or a process that was stopped with all its children, has a scheduler that did not hang."""
LOOK_S: Final = 1.0
_ASK_EVERY_S: Final = 10.0


async def until_it_hangs(ask: Callable[[], Awaitable[object]], *, is_excused: Callable[[], bool]) -> None:
    """Return when the scheduler hangs.

    Args:
        ask: Has the scheduler answer a question that it answers between any two batches.
        is_excused: Whether it has a reason to answer nothing now, such as weights that it is loading.
    """
    while True:
        asking = asyncio.ensure_future(ask())
        num_silent = 0
        try:
            while not asking.done():
                if num_silent >= MAX_SILENT_LOOKS:
                    return
                await asyncio.wait({asking}, timeout=LOOK_S)
                num_silent = 0 if is_excused() else num_silent + 1
        finally:
            asking.cancel()
        asking.result()
        await asyncio.sleep(_ASK_EVERY_S)
