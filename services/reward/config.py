"""Settings of the reward service."""

from decimal import Decimal

import pydantic

from penstock.config import Config


class ProfileConfig(Config):
    """The scale of one profile."""

    reward_max: float = pydantic.Field(default=1.0, allow_inf_nan=False)
    """Score of a right answer."""
    reward_min: float = pydantic.Field(default=0.0, allow_inf_nan=False)
    """Score of a wrong one, and of what could not be judged."""


class RewardConfig(Config):
    """How the reward service listens, judges and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    workers: int = pydantic.Field(default=2, ge=1, le=256)
    """Worker processes for symbolic comparison; each has one item at a time."""
    deadline_s: float = pydantic.Field(default=1.0, gt=0)
    """Wall-clock limit of one item that asks for none, from when a worker takes it; then the worker is killed."""
    max_deadline_s: float = pydantic.Field(default=30.0, gt=0)
    """The most an item may ask for."""
    memory_limit_mb: int = pydantic.Field(default=256, ge=128)
    """Address space of a worker process, in MiB; about 100 of it are its own libraries."""
    recycle_after: int = pydantic.Field(default=5000, ge=1)
    """A worker process is replaced by a fresh one after so many items."""
    max_queue: int = pydantic.Field(default=4096, ge=1)
    """Items in the service at once, running ones included; calls that bring more are refused."""
    max_response_chars: int = pydantic.Field(default=65536, ge=1024)
    """Only so many characters of a response, from its end, are searched for the answer."""
    max_answer_chars: int = pydantic.Field(default=512, ge=1)
    """An answer that is longer is judged TOO_LARGE, a gold answer GOLD_INVALID."""
    geo3k_tolerance: Decimal = pydantic.Field(default=Decimal("0.05"), ge=0)
    """Profile geo3k: largest |answer - gold| that is right for golds with a decimal point; 0 is strict."""
    profiles: dict[str, ProfileConfig] = pydantic.Field(default_factory=dict)
    """Scales of the profiles, by profile: [reward.profiles.math] reward_min = -1."""
    grace_s: float = pydantic.Field(default=5.0, ge=0)
    """When stopping, how long calls in progress may still take."""
