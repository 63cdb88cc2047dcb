"""How a push ended."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from services.trainer.weight_sync.push_calls import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """How a push ended. Members that are neither done nor failed suffered from others: another push may succeed."""

    done: tuple[Member, ...]
    """Members that serve the version."""
    failed: Mapping[Member, PenstockError]
    """Members that failed by themselves, and why."""
    failed_in: Mapping[Member, str]
    """The stage in which each of them failed."""
    is_reusable: bool
    """Whether the transport can carry another push to the same members."""
    paused_s: Mapping[Member, float]
    """How long each member that was asked to stop generating was kept from it."""
    stages_s: Mapping[str, float]
    """Duration of each stage that was reached: the mean over members that go through it alone."""
