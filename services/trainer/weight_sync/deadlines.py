"""Deadlines of the stages of a push, and of a whole push."""

from dataclasses import dataclass
from typing import Self

from services.trainer.config import WeightSyncConfig

CONTROL_S = 10.0
"""Most seconds for calls that move no weights and wait for nothing but a busy event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDeadlines:
    """Seconds for each stage. The time for running requests to finish (mode drain) is added to them."""

    prepare_s: float
    upload_s: float
    pause_s: float
    transfer_s: float
    commit_s: float
    """It computes the digests, which reads every byte again."""
    control_s: float
    """Seconds for an abort, and for asking a replica for its state."""

    @classmethod
    def of(cls, config: WeightSyncConfig) -> Self:
        """Return the deadlines that the two settings imply."""
        return cls(
            prepare_s=config.stage_timeout_s,
            upload_s=config.transfer_timeout_s if config.transport == "delta" else 0.0,
            pause_s=config.stage_timeout_s,
            transfer_s=config.transfer_timeout_s,
            commit_s=config.transfer_timeout_s,
            control_s=min(CONTROL_S, config.stage_timeout_s),
        )

    @property
    def push_s(self) -> float:
        """Longest duration of a push in which every stage keeps its deadline; engines are told this value."""
        return self.prepare_s + self.upload_s + self.pause_s + self.transfer_s + self.commit_s
