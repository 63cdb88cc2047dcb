"""Configuration of the rollout worker: section `[worker]` of a recipe."""

import dataclasses

import pydantic

from penstock.config import BusConfig, Config, ModelConfig, NetworkConfig, RunConfig, SamplingConfig
from services.rollout.worker.environments.config import EnvironmentTables


class WorkerConfig(Config):
    """How many groups a worker plays, with whom, and for how long."""

    num: int = pydantic.Field(default=1, ge=1)
    """Worker processes that `penstock train` starts."""
    concurrency: int = pydantic.Field(default=16, ge=1)
    """Prompt groups that one worker process plays at once."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port on which it answers health checks; 0 takes any that is free. Several workers on one machine need 0."""
    router_address: str = ""
    """host:port of the router, or of a single engine. Empty: the router's port on this machine."""
    reward_address: str = ""
    """host:port of the reward service. Empty: the reward service's port on this machine."""
    environments: EnvironmentTables = pydantic.Field(default_factory=dict)
    """Your own environments, and arguments of built-in ones: name, as prompts call it, to "package.module:Class", or to
    a table."""
    episode_timeout_s: float = pydantic.Field(default=900.0, gt=0)
    """Seconds for all turns of an episode and its environment, queues and verdicts not counted. A sample that takes
    longer ends with the tokens that came, finish reason `deadline`. `data.limits` may ask for less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All that a worker process receives."""

    worker: WorkerConfig
    run: RunConfig
    network: NetworkConfig
    bus: BusConfig
    model: ModelConfig
    sampling: SamplingConfig
    context_length: int
    """Largest number of tokens of prompt and response together; 0: the model's own limit."""
    router_address: str
    """host:port of the router."""
    reward_address: str
    """host:port of the reward service."""
