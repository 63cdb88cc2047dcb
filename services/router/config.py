"""Settings of the router."""

import dataclasses
import enum

import pydantic

from penstock.config import BusConfig, Config, ModelConfig, NetworkConfig, RunConfig, SamplingConfig


class Balancing(enum.StrEnum):
    """How a replica is chosen among those that can take a call."""

    AFFINITY = "affinity"
    PREFIX = "prefix"
    ROUND_ROBIN = "round_robin"
    CONSISTENT_HASH = "consistent_hash"


class OpenAIConfig(Config):
    """The OpenAI-compatible HTTP frontend; router.http_port switches it on."""

    model: str = pydantic.Field(default="", max_length=256)
    """Name under which the policy is served; empty: the run's name."""
    timeout_s: float = pydantic.Field(default=600.0, gt=0, allow_inf_nan=False)
    """Deadline of one answer, in seconds."""
    max_body_mb: int = pydantic.Field(default=64, ge=1, le=1024)
    """Largest request body, in MiB; larger ones are refused."""
    max_image_mb: int = pydantic.Field(default=20, ge=1, le=256)
    """Largest image, in MiB; requests with larger ones are refused."""
    max_images: int = pydantic.Field(default=32, ge=0)
    """Most images in one conversation."""
    max_choices: int = pydantic.Field(default=16, ge=1)
    """Most choices that one request may ask for, over all its prompts."""
    recordings_max_age_s: float = pydantic.Field(default=7 * 86400.0, ge=1, allow_inf_nan=False)
    """Recorded calls older than this, in seconds, are removed."""
    recordings_max_mb: int = pydantic.Field(default=1024, ge=1)
    """Room for recorded calls, in MiB; when it is used up, calls that ask to be recorded fail."""


class RouterConfig(Config):
    """How the router listens, how it chooses a replica, and how long it tries."""

    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    http_port: int | None = pydantic.Field(default=None, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP frontend; 0 takes a free one; unset: no HTTP."""
    openai: OpenAIConfig = OpenAIConfig()
    """The OpenAI-compatible HTTP frontend."""
    balancing: Balancing = Balancing.AFFINITY
    """How a replica is chosen. affinity: a session stays on its replica, new sessions go to the least loaded. prefix:
    to the replica that recently had the longest beginning of the prompt, unless it is overloaded. round_robin: in turn.
    consistent_hash: by a hash of the session id, so that several routers agree without talking to each other. For PD
    pairs this chooses the prefill replica; its least loaded partner decodes."""
    max_waiting: int = pydantic.Field(default=4096, ge=0)
    """Most calls in the wait queue. More fail with RESOURCE_EXHAUSTED, except calls that have lost a replica."""
    max_waiting_mb: int = pydantic.Field(default=512, ge=1)
    """Most MiB of requests, images included, in the wait queue. More fail in the same way."""
    wait_for_replica_s: float = pydantic.Field(default=30.0, ge=0)
    """How long a call may wait, in total or since its last tokens, while no replica can take it; then it fails with
    UNAVAILABLE, or with RESOURCE_EXHAUSTED if replicas keep rejecting it. While replicas are merely at their limit, it
    waits until its deadline, and so does a call that has just broken a replica, so that `max_attempts` is reached."""
    max_attempts: int = pydantic.Field(default=3, ge=1)
    """After this many replicas in a row failed a call without delivering a token, it is given up with ABORTED: the call
    may be what breaks them."""
    max_call_s: float = pydantic.Field(default=3600.0, gt=0)
    """Deadline of calls whose callers set none or a longer one, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """All settings of a router process."""

    router: RouterConfig
    run: RunConfig
    bus: BusConfig
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    model: ModelConfig | None = None
    """Only the OpenAI-compatible frontend needs it."""
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    """Defaults of that frontend's requests."""
