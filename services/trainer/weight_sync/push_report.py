"""What came of publishing a version."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The result of publishing a version."""

    version: int
    num_replicas: int
    """Replicas that were brought to the version."""
    num_failed: int
    """Replicas that failed; they are retried while they live."""
    num_bytes: int
    """Size of the weights."""
    push_s: float
    """From the first call to the last answer."""
    pause_s: float
    """How long an engine was kept from generating, on average over those that were asked to stop; 0 if none was."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Duration of each stage, summed over pushes; of replicas that take a push alone, their mean."""
