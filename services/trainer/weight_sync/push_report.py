"""The result of publishing a version."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The result of publishing a version."""

    version: int
    num_replicas: int
    """Replicas that received the version."""
    num_failed: int
    """Replicas that failed; they are retried while they live."""
    num_bytes: int
    """Size of the weights in bytes."""
    push_s: float
    """Seconds from the first call to the last answer."""
    paused_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each paused replica was kept from generating, by its identity."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage, summed over pushes; of stages that each replica takes alone, the mean over replicas."""

    @property
    def pause_s(self) -> float:
        """Mean of `paused_s`; 0 if none was paused."""
        return statistics.fmean(self.paused_s.values()) if self.paused_s else 0.0

    @property
    def longest_pause(self) -> tuple[str, float]:
        """The replica that was paused longest, and for how many seconds; an empty name and 0 if none was paused."""
        return max(self.paused_s.items(), key=lambda pause: pause[1], default=("", 0.0))
