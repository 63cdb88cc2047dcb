"""The outcome of a push."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from services.trainer.weight_sync.push_calls import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """The outcome of a push. Members neither done nor failed suffered from others: another push may succeed."""

    done: tuple[Member, ...]
    """Members that serve the version."""
    failed: Mapping[Member, PenstockError]
    """Members that caused their own failure, and the errors."""
    failed_in: Mapping[Member, str]
    """The stage in which each member failed."""
    is_reusable: bool
    """Whether the transport can carry another push to the same members."""
    paused_s: Mapping[Member, float]
    """Seconds that each paused member was kept from generating."""
    stages_s: Mapping[str, float]
    """Seconds of each stage that was reached; of stages that each member takes alone, the mean over members."""
