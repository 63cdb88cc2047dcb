"""The recipe: all settings of a run, in TOML files that all of its processes read.

Imports only the services' settings, so that a mistyped key is reported before anything heavy is loaded.
"""

from typing import Any, Self

import pydantic

from penstock.config import (
    BusConfig,
    Config,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    NetworkConfig,
    RunConfig,
    SamplingConfig,
    SecurityConfig,
    TraceConfig,
)
from penstock.names import SINGLE_TURN
from services.launch.config import LaunchConfig
from services.launch.slurm.config import SlurmConfig
from services.reward.config import RewardConfig
from services.rollout.engine.config import MAX_PUSH_S, RolloutConfig
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.config import EnvironmentServerConfig
from services.router.config import RouterConfig
from services.trainer.admission.config import FilterConfig, contradiction
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.checks.adapters import adapter_contradiction
from services.trainer.checks.answer_length import most_own_tokens, penalty_contradiction
from services.trainer.checks.router_replay import pairs_contradiction
from services.trainer.checks.schedule import schedule_contradiction
from services.trainer.config import TrackersConfig, TrainerConfig
from services.trainer.data.config import DataConfig
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.evaluation.config import EvaluationConfig, inherit
from services.trainer.sft.config import SftConfig
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.weight_sync.deadlines import PushDeadlines


class Recipe(Config):
    """All settings of a run."""

    model: ModelConfig | None = None
    run: RunConfig = RunConfig()
    launch: LaunchConfig = LaunchConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    filters: FilterConfig = FilterConfig()
    demonstrations: DemonstrationsConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    trackers: TrackersConfig = TrackersConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    trace: TraceConfig = TraceConfig()
    rollout: RolloutConfig = RolloutConfig()
    worker: WorkerConfig = WorkerConfig()
    environment_server: EnvironmentServerConfig = EnvironmentServerConfig()
    reward: RewardConfig = RewardConfig()
    router: RouterConfig = RouterConfig()
    network: NetworkConfig = NetworkConfig()
    bus: BusConfig = BusConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    slurm: SlurmConfig = SlurmConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _pass_on_to_evaluation_sets(cls, recipe: Any) -> Any:
        return inherit(recipe)

    @pydantic.model_validator(mode="after")
    def _engines_allow_the_push(self) -> Self:
        weight_sync = self.trainer.weight_sync
        push_s = PushDeadlines.of(weight_sync).push_s
        if push_s > MAX_PUSH_S:
            raise ValueError(
                f"trainer.weight_sync.transfer_timeout_s = {weight_sync.transfer_timeout_s:g} and stage_timeout_s = "
                f"{weight_sync.stage_timeout_s:g} let a push take {push_s:g} s, more than the {MAX_PUSH_S:g} s that "
                "engines accept; lower them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _engines_can_report_experts(self) -> Self:
        rollout = self.rollout
        has_pairs = rollout.prefill > 0 or rollout.decode > 0 or rollout.role != "unified"
        if reason := pairs_contradiction(self.trainer.router_replay, has_pairs=has_pairs):
            raise ValueError(reason)
        return self

    @pydantic.model_validator(mode="after")
    def _filters_fit_the_algorithm(self) -> Self:
        if reason := contradiction(self.filters, self.algorithm):
            raise ValueError(reason)
        return self

    @pydantic.model_validator(mode="after")
    def _adapters_fit_the_reference(self) -> Self:
        if reason := adapter_contradiction(self.trainer.lora, self.algorithm.kl):
            raise ValueError(reason)
        return self

    @pydantic.model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        trainer = self.trainer
        if self.sft.epochs:
            return self  # the rows decide on the steps of a supervised run
        if reason := schedule_contradiction(trainer.optimizer, num_steps=trainer.num_steps):
            raise ValueError(f"trainer.num_steps = {trainer.num_steps}: {reason}")
        return self

    @pydantic.model_validator(mode="after")
    def _length_penalty_can_apply(self) -> Self:
        if SINGLE_TURN in self.worker.environments:
            return self  # one of the user's own, with any number of turns
        most = most_own_tokens(self.data, self.sampling, context_length=self.rollout.context_length)
        penalty, max_new_tokens = self.algorithm.advantage.length_penalty, self.sampling.max_new_tokens
        if reason := penalty_contradiction(penalty, most, max_new_tokens=max_new_tokens):
            raise ValueError(reason)
        return self
