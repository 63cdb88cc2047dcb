"""The recipe: all settings of a run, in TOML files that its processes share.

Imports the services' settings only, so that a mistyped key is reported before anything heavy is loaded.
"""

from penstock.config import BusConfig, Config, LogConfig, ModelConfig, RunConfig, SamplingConfig, SecurityConfig
from services.launch.config import LaunchConfig
from services.reward.config import RewardConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.worker.config import WorkerConfig
from services.router.config import RouterConfig
from services.trainer.config import DataConfig, TrainerConfig


class Recipe(Config):
    """All settings of a run."""

    model: ModelConfig | None = None
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    worker: WorkerConfig = WorkerConfig()
    reward: RewardConfig = RewardConfig()
    router: RouterConfig = RouterConfig()
    bus: BusConfig = BusConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()
