"""Settings of the router."""

import dataclasses
import enum

import pydantic

from penstock.config import BusConfig, Config, MetricsConfig, ModelConfig, NetworkConfig, RunConfig, SamplingConfig


class Balancing(enum.StrEnum):
    """Rule that chooses a replica among those that can take a call."""

    AFFINITY = "affinity"
    PREFIX = "prefix"
    ROUND_ROBIN = "round_robin"
    CONSISTENT_HASH = "consistent_hash"


class OpenAIConfig(Config):
    """The OpenAI-compatible HTTP frontend; router.http_port switches it on."""

    model: str = pydantic.Field(default="", max_length=256)
    """Name under which the policy is served; empty: the run's name."""
    default_max_tokens: int | None = pydantic.Field(default=None, ge=0)
    """Maximum tokens of an answer whose request sets no max_tokens; 0: as many as the context leaves, as vLLM and
    SGLang do for chats; unset: sampling.max_new_tokens."""
    separate_reasoning: bool = False
    """Whether chats return the text between <think> and </think> as reasoning_content, apart from content, if the
    request does not set separate_reasoning."""
    recordings_max_mb: int = pydantic.Field(default=1024, ge=1)
    """Room for recorded calls, in MiB, kept for a week; when it is used up, calls that must be recorded fail."""


class RouterConfig(Config):
    """The router's ports, its choice of replicas, and how long a call may wait."""

    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes any free one."""
    http_port: int | None = pydantic.Field(default=None, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP frontend; 0 takes any free one; unset: no HTTP."""
    openai: OpenAIConfig = OpenAIConfig()
    """The OpenAI-compatible HTTP frontend."""
    balancing: Balancing = Balancing.AFFINITY
    """Rule that chooses a replica. affinity: a session stays on its replica, and a group's sessions begin on the same
    one, which they may fill beyond its limit; new groups go to the least loaded. prefix: the replica that recently had
    the longest beginning of the prompt, unless it is overloaded. round_robin: in turn. consistent_hash: by a hash of
    the group id, or else the session id, so that several routers agree without communication. For PD pairs this chooses
    the prefill replica; its least loaded partner decodes."""
    max_waiting: int = pydantic.Field(default=4096, ge=0)
    """Maximum calls in the wait queue, with at most 512 MiB of requests. Further calls fail with RESOURCE_EXHAUSTED,
    except calls that have lost a replica."""
    wait_for_replica_s: float = pydantic.Field(default=30.0, ge=0)
    """Seconds that a call may wait, in total or since its last tokens, while no replica can take it; then it fails with
    UNAVAILABLE, or with RESOURCE_EXHAUSTED if replicas keep rejecting it. While replicas are merely at their limit, it
    waits until its deadline. So does a call that has just broken a replica; one that has broken three in a row fails
    with ABORTED. A call of an agent's session waits as long as its episode has time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """All settings of a router process."""

    router: RouterConfig
    run: RunConfig
    bus: BusConfig
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    model: ModelConfig | None = None
    """Needed only by the OpenAI-compatible frontend."""
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    """Defaults of that frontend's requests."""
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
