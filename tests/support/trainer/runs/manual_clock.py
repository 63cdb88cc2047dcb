"""A clock that moves when a test moves it."""

from tests.support.waiting import settled, until


class ManualClock:
    """Seconds since the test began."""

    def __init__(self) -> None:
        """Stand at 0."""
        self._seconds = 0.0
        self._num_reads = 0

    def __call__(self) -> float:
        """Read it."""
        self._num_reads += 1
        return self._seconds

    def move(self, seconds: float) -> None:
        """Let time pass for whoever waits."""
        self._seconds += seconds

    async def read(self) -> None:
        """Return when someone has read it again, and every task has gone as far as it can by itself."""
        num_reads = self._num_reads
        await until(lambda: self._num_reads > num_reads)
        await settled()
