"""Settings of the router."""

import dataclasses
import enum

import pydantic

from penstock.config import BusConfig, Config, ModelConfig, RunConfig, SamplingConfig


class BalancingName(enum.StrEnum):
    """How a replica is chosen among those that could take a call."""

    AFFINITY = "affinity"
    PREFIX = "prefix"
    ROUND_ROBIN = "round_robin"
    CONSISTENT_HASH = "consistent_hash"


class LimitConfig(Config):
    """How many calls one replica is given at once. The limit follows what the replica says in its lease: it grows by
    addition while it is used up and the replica keeps up, and shrinks by multiplication when the replica does not."""

    factor: float = pydantic.Field(default=1.5, ge=1)
    """The limit starts at what the replica runs at once (its max_running) and never exceeds so many times that; what
    is above 1 waits in the replica's own queue, so that no place there stays empty between two calls."""
    kv_high: float = pydantic.Field(default=0.95, gt=0, le=1)
    """A replica that uses more of its KV cache than this share is given less."""
    queue_high: float = pydantic.Field(default=0.5, ge=0)
    """A replica with a longer queue than this share of its max_running is given less."""
    increase: float = pydantic.Field(default=0.0625, gt=0, le=1)
    """By which share of max_running, at least 1, the limit grows in the time in which leases are renewed once."""
    decrease: float = pydantic.Field(default=0.7, gt=0, lt=1)
    """The limit's multiplier when it shrinks; it never gets below 1."""


class BreakerConfig(Config):
    """When a replica that fails is given no calls, and for how long."""

    failures: int = pydantic.Field(default=3, ge=1)
    """After so many failures with no success between them; one is enough where there is no connection."""
    open_s: float = pydantic.Field(default=1.0, gt=0)
    """How long it then gets none. After that it gets one call as a probe; when that fails, none for twice as long. A
    probe that tells nothing for so long is followed by another."""
    max_open_s: float = pydantic.Field(default=30.0, gt=0)
    """The longest that it gets none between two probes."""


class OpenAIConfig(Config):
    """The OpenAI-compatible face; router.http_port switches it on."""

    model: str = pydantic.Field(default="", max_length=256)
    """Name under which the policy is served; empty: the run's name."""
    timeout_s: float = pydantic.Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest that an answer may take."""
    max_body_mb: int = pydantic.Field(default=64, ge=1, le=1024)
    """Larger requests, in MiB, are refused."""
    max_image_mb: int = pydantic.Field(default=20, ge=1, le=256)
    """Larger images, in MiB, are refused."""
    max_images: int = pydantic.Field(default=32, ge=0)
    """The most images of a conversation."""
    max_choices: int = pydantic.Field(default=16, ge=1)
    """The most choices that one request may ask for, over all its prompts."""
    recordings_max_age_s: float = pydantic.Field(default=7 * 86400.0, ge=1, allow_inf_nan=False)
    """Recorded calls are removed when they are so old."""
    recordings_max_mb: int = pydantic.Field(default=1024, ge=1)
    """When the recorded calls take so many MiB, no more are taken: calls that are to be recorded fail."""


class RouterConfig(Config):
    """How the router listens, how it chooses, and how long it tries."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    http_port: int | None = pydantic.Field(default=None, ge=0, le=65535)
    """Port to listen on for HTTP as OpenAI's clients speak it; 0 takes a free one; by default there is none."""
    openai: OpenAIConfig = OpenAIConfig()
    """The OpenAI-compatible face."""
    balancing: BalancingName = BalancingName.AFFINITY
    """affinity: a session's calls go to one replica, new sessions to the least loaded. prefix: to the replica that had
    the longest part of the prompt lately, unless it is overloaded. round_robin: in turn. consistent_hash: by the
    session's id, so that several routers agree without telling each other. Where prefill and decode are two replicas,
    the prefill replica is chosen so; of those that can decode for it, the least loaded does."""
    max_load_ratio: float = pydantic.Field(default=1.25, gt=1)
    """prefix and consistent_hash pass over a replica whose load is above so many times that of the others."""
    limit: LimitConfig = LimitConfig()
    """How many calls one replica is given at once."""
    breaker: BreakerConfig = BreakerConfig()
    """When a replica that fails is given no calls."""
    max_waiting: int = pydantic.Field(default=4096, ge=0)
    """The most calls that wait for a place, first come, first served; a call beyond them fails with
    RESOURCE_EXHAUSTED, unless it has lost a replica and waits for the next."""
    wait_for_replica_s: float = pydantic.Field(default=30.0, ge=0)
    """How long a call may wait, all in all or since its last tokens, while there is no replica that could take it; then
    it fails with UNAVAILABLE, or with RESOURCE_EXHAUSTED if all turn calls away. Where some are at their limit of
    calls, it waits until its deadline."""
    max_tries: int = pydantic.Field(default=3, ge=1)
    """A call that so many replicas in a row took and failed without a token is given up: it may be what breaks them."""
    chunk_tokens: int = pydantic.Field(default=64, ge=1)
    """Unary calls are played as streams with chunks of so many tokens: what a replica that dies costs at most."""
    route_ttl_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest that a client keeps a place given out by Route without giving it back."""
    max_call_s: float = pydantic.Field(default=3600.0, gt=0)
    """Longest that a call may take; callers usually set a shorter deadline."""
    max_sessions: int = pydantic.Field(default=100_000, ge=1)
    """Sessions whose replica is remembered; the one unused for longest is forgotten first."""
    max_prefix_blocks: int = pydantic.Field(default=200_000, ge=1)
    """prefix: blocks of 64 tokens whose replica is remembered; the one unused for longest is forgotten first."""
    grace_s: float = pydantic.Field(default=5.0, ge=0)
    """When stopping, how long calls in progress may still take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """All that a router process receives."""

    router: RouterConfig
    run: RunConfig
    bus: BusConfig
    model: ModelConfig | None = None
    """Only the OpenAI-compatible API needs it."""
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    """Defaults of that API's requests."""
