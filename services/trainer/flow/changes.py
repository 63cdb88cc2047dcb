"""Tells the batch source that the ledger may have changed, so that it looks again."""

import asyncio


class Changes:
    """Set by feeder and collector, awaited by the batch source alone."""

    def __init__(self) -> None:
        """Nothing has changed yet."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the wait, or the next one if nobody waits."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a change since the last wait ended; return False if there is none in time."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return False
        self._event.clear()
        return True
