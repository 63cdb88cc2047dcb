"""The recipe: all settings of a run, in TOML files that its processes share.

Imports the services' settings only, so that a mistyped key is reported before anything heavy is loaded.
"""

from typing import Self

import pydantic

from penstock.config import (
    BusConfig,
    Config,
    LogConfig,
    ModelConfig,
    NetworkConfig,
    RunConfig,
    SamplingConfig,
    SecurityConfig,
)
from services.launch.config import LaunchConfig
from services.reward.config import RewardConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.worker.config import WorkerConfig
from services.router.config import RouterConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.config import DataConfig, TrainerConfig
from services.trainer.weight_sync.deadlines import PushDeadlines


class Recipe(Config):
    """All settings of a run."""

    model: ModelConfig | None = None
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    worker: WorkerConfig = WorkerConfig()
    reward: RewardConfig = RewardConfig()
    router: RouterConfig = RouterConfig()
    network: NetworkConfig = NetworkConfig()
    bus: BusConfig = BusConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()

    @pydantic.model_validator(mode="after")
    def _engines_allow_the_push(self) -> Self:
        push_s = PushDeadlines.of(self.trainer.weight_sync).push_s
        if push_s > self.rollout.push_deadline_s:
            raise ValueError(
                f"rollout.push_deadline_s = {self.rollout.push_deadline_s:g} is less than the {push_s:g} s that a push "
                "may take by trainer.weight_sync; raise it, or lower trainer.weight_sync.transfer_timeout_s"
            )
        stage_s = self.trainer.weight_sync.stage_timeout_s
        if stage_s > self.rollout.prepare_deadline_s:
            raise ValueError(
                f"rollout.prepare_deadline_s = {self.rollout.prepare_deadline_s:g} is less than the {stage_s:g} s of "
                "trainer.weight_sync.stage_timeout_s, so engines would give up first; raise the one or lower the other"
            )
        return self
