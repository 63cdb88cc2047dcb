"""Notifies the batch source that the ledger may have changed."""

import asyncio


class Changes:
    """A signal set by feeder and collector, and awaited only by the batch source."""

    def __init__(self) -> None:
        """Start without a change."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the current wait, or the next one if there is none."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a change since the last wait ended; return False if there is none in time."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return False
        self._event.clear()
        return True
