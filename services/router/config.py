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
    default_max_tokens: int | None = pydantic.Field(default=None, ge=0)
    """Most tokens of an answer whose request sets no max_tokens; 0: as many as the context leaves, as vLLM and SGLang
    do for chats; unset: sampling.max_new_tokens."""
    separate_reasoning: bool = False
    """Whether chats return what stands between <think> and </think> as reasoning_content, apart from content, where a
    request does not say with separate_reasoning."""
    recordings_max_mb: int = pydantic.Field(default=1024, ge=1)
    """Room for recorded calls, in MiB, kept for a week; when it is used up, calls that ask to be recorded fail."""


class RouterConfig(Config):
    """How the router listens, how it chooses a replica, and how long a call may wait."""

    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    http_port: int | None = pydantic.Field(default=None, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP frontend; 0 takes a free one; unset: no HTTP."""
    openai: OpenAIConfig = OpenAIConfig()
    """The OpenAI-compatible HTTP frontend."""
    balancing: Balancing = Balancing.AFFINITY
    """How a replica is chosen. affinity: a session stays on its replica, and a group's sessions begin on the same one,
    which they may fill beyond its limit; new groups go to the least loaded. prefix: to the replica that recently had
    the longest beginning of the prompt, unless it is overloaded. round_robin: in turn. consistent_hash: by a hash of
    the session id, so that several routers agree without talking to each other. For PD pairs this chooses the prefill
    replica; its least loaded partner decodes."""
    max_waiting: int = pydantic.Field(default=4096, ge=0)
    """Most calls in the wait queue, with 512 MiB of requests at most. More fail with RESOURCE_EXHAUSTED, except calls
    that have lost a replica."""
    wait_for_replica_s: float = pydantic.Field(default=30.0, ge=0)
    """How long a call may wait, in total or since its last tokens, while no replica can take it; then it fails with
    UNAVAILABLE, or with RESOURCE_EXHAUSTED if replicas keep rejecting it. While replicas are merely at their limit, it
    waits until its deadline, and so does a call that has just broken a replica: after three replicas in a row it fails
    with ABORTED. A call of an agent's session waits as long as its episode has time."""


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
