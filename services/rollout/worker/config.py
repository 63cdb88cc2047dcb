"""Configuration of the rollout worker: section `[worker]` of a recipe."""

import dataclasses
from typing import Self

import pydantic

from penstock.config import BusConfig, Config, MetricsConfig, ModelConfig, NetworkConfig, RunConfig, SamplingConfig
from penstock.config.http_url import is_http_url
from services.rollout.worker.agents.config import AgentConfig
from services.rollout.worker.environments.config import MAX_PROCESSES, EnvironmentTables


class WorkerConfig(Config):
    """How many groups a worker plays, its peers, and its time limits."""

    num: int = pydantic.Field(default=1, ge=1)
    """Worker processes that `penstock train` starts."""
    concurrency: int = pydantic.Field(default=16, ge=1)
    """Prompt groups that one worker process plays at once."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port for health checks; 0 takes any free one. Several workers on one machine need 0."""
    router_address: str = ""
    """host:port of the router, or of a single engine. Empty: the router's port on this machine."""
    reward_address: str = ""
    """host:port of the reward service. Empty: the reward service's port on this machine."""
    environments: EnvironmentTables = pydantic.Field(default_factory=dict)
    """Your own environments, and arguments of built-in ones: the name that prompts use, mapped to
    "package.module:Class" or to a table."""
    environment_processes: int = pydantic.Field(default=MAX_PROCESSES, ge=1)
    """Episodes with their own process that one worker process, or server of environments, plays at once. Further
    episodes wait before they begin, outside their deadline. Lower it for environments that need much memory."""
    agents: dict[str, AgentConfig] = pydantic.Field(default_factory=dict)
    """Your own agents, by the name that prompts use in place of an environment."""
    router_url: str = ""
    """http(s)://host:port of the router's OpenAI-compatible API, as agents reach it, without /v1. Empty:
    router.http_port on this machine."""
    episode_timeout_s: float = pydantic.Field(default=900.0, gt=0)
    """Seconds for all turns of an episode and its environment, without queues and verdicts; an agent's include queues.
    A sample that takes longer ends with the tokens it has, finish reason `deadline`. `data.limits` may set less. One
    turn of an environment has at most an hour in the router, its queue included."""

    strip_thinking: bool = False
    """Whether later turns leave out the policy's earlier thoughts when an environment answers, where the model's chat
    template does; otherwise the policy continues from all that it said. Thoughts left out take no room in
    `data.limits`, and the sample is trained as one sequence for each text that the policy saw. Agents keep them."""

    @pydantic.field_validator("router_url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        if url and (not is_http_url(url) or any(part in f"{url}/" for part in ("/v1/", "?", "#", "@"))):
            raise ValueError("the router's URL must be http://host:port or https://host:port, without /v1")
        return url

    @pydantic.model_validator(mode="after")
    def _names_are_different(self) -> Self:
        if both := sorted(set(self.agents) & set(self.environments)):
            raise ValueError(f"{both} are names of agents and of environments; rename one of each")
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything that a worker process receives."""

    worker: WorkerConfig
    run: RunConfig
    network: NetworkConfig
    bus: BusConfig
    model: ModelConfig
    sampling: SamplingConfig
    context_length: int
    """Maximum tokens of prompt and response together; 0: the model's own limit."""
    router_address: str
    """host:port of the router."""
    reward_address: str
    """host:port of the reward service."""
    router_url: str = ""
    """http(s)://host:port of the router's OpenAI-compatible API; empty if there are no agents."""
    router_replay: bool = False
    """trainer.router_replay: whether engines are asked which experts computed each token that is trained."""
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
