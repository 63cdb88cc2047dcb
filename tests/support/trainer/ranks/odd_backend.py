"""A backend whose rank 1 does something else at the beginning of a step than the others, which then wait for it.

It has no model: what ranks do about it does not depend on one, and importing transformers takes longer than all else.
"""

import time
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError
from services.trainer.backend.base import StateDigests
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks.ranks import Ranks

_COMPUTES_S = 7.0
"""Processor time that `computes` takes."""


class OddBackend(InProcessBackend):
    """It `sleeps`, `computes` for long, `refuses` the command, or, before any, `refuses to begin`; or `keeps up`."""

    def __init__(self, *args: Any, odd: str, ranks: Ranks, **settings: Any) -> None:
        if odd == "refuses to begin" and ranks.rank == 1:
            raise ConfigError("this machine is odd")
        super().__init__(*args, ranks=ranks, **settings)
        self._odd = odd
        self._ranks = ranks

    def load(self, checkpoint: Path | None) -> None:
        """There is nothing to load."""

    def digests(self) -> StateDigests:
        """Nothing has any."""
        return StateDigests(weights="", random_state="")

    def begin_step(self, policy_version: int) -> None:
        """Meet the others."""
        if self._ranks.rank == 1:
            if self._odd == "sleeps":
                time.sleep(600.0)
            until = time.process_time() + _COMPUTES_S * (self._odd == "computes")
            while time.process_time() < until:
                pass
            if self._odd == "refuses":
                raise DataError("this rank is odd")
        self._ranks.gather(None)
