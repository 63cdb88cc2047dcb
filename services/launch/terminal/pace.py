"""How often a run is shown: work that reads all of its steps takes longer the more there are."""

import math
import time
from collections.abc import Callable
from typing import Final

_REST: Final = 20.0
"""Time between two looks, as a multiple of the time that a look takes."""
_MAX_REST_S: Final = 30.0
"""However long a look took: it also waits for a terminal that has stopped, as by Ctrl-S."""


class Pace:
    """Keeps the share of time that goes into showing a run below a twentieth, for looks of up to 1.5 s."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        """Let the first look be due at once."""
        self._now = now
        self._due_at = -math.inf

    def when_due(self, look: Callable[[], None]) -> None:
        """Call `look`, unless it is too soon after the last time."""
        began = self._now()
        if began < self._due_at:
            return
        look()
        ended = self._now()
        self._due_at = ended + min(_MAX_REST_S, _REST * (ended - began))
