"""The result of publishing a version."""

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
    pause_s: float
    """Seconds that an engine was kept from generating, on average over paused engines; 0 if none was paused."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage, summed over pushes; of stages that each replica takes alone, the mean over replicas."""
