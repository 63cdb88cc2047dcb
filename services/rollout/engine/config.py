"""Settings of the rollout engines, section [rollout] of a recipe."""

import dataclasses
from typing import Any, Literal

import pydantic

from penstock.config import BusConfig, Config, MetricsConfig, ModelConfig, NetworkConfig, RunConfig
from services.rollout.engine.sglang import recipe_settings

MAX_PUSH_S = 3600.0
"""Pushes with a longer deadline are refused: until it passes, the engine would neither generate nor report a fault."""


class RolloutConfig(Config):
    """Settings of the rollout engines, the same for every engine of a run."""

    replicas: int = pydantic.Field(default=1, ge=0)
    """Unified engines that `penstock train` starts: each computes prompts and generates."""
    prefill: int = pydantic.Field(default=0, ge=0)
    """Prefill engines that `penstock train` starts as well. They compute prompts for decode engines."""
    decode: int = pydantic.Field(default=0, ge=0)
    """Decode engines that `penstock train` starts as well. They generate from the prompts of prefill engines."""
    role: Literal["unified", "prefill", "decode"] = "unified"
    """Role of the engine that `penstock serve rollout` starts: unified, prefill or decode."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one. `penstock train` with several engines needs 0."""

    transfer_backend: Literal["auto", "mooncake", "nixl"] = "auto"
    """Library that carries the KV cache from prefill to decode engines: mooncake or nixl, the same in all engines.
    auto: nixl on a CPU, where it needs no other library, and mooncake on a GPU."""
    pair_deadline_s: float = pydantic.Field(default=10.0, ge=1)
    """The longest that one peer of a prefill/decode pair waits for the other, rounded up to seconds. It includes the
    other's queue, so raise it for a model whose prompts take seconds to compute."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """GPUs that share the layers of one engine; the same in prefill and decode engines. On a CPU they are processes,
    which gain nothing: `penstock train` refuses them there, tests start them."""
    expert_parallel: int = pydantic.Field(default=1, ge=1)
    """Divides the experts of a mixture as wholes among the GPUs of an engine, if it equals tensor_parallel. 1: each GPU
    has a part of every expert; with many GPUs the parts may be too narrow to compute fast, or not divide evenly."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and KV cache. auto: bfloat16 on a GPU, float32 on a CPU. Engines take pushes in their own
    precision alone, so trainer.dtype must be the same, and float16 is for engines without a trainer."""
    context_length: int = pydantic.Field(default=0, ge=0)
    """Maximum tokens of prompt and response together; 0: the model's own limit."""
    max_running: int = pydantic.Field(default=64, ge=1)
    """Requests that generate at once. Four times as many may wait; more are refused as overloaded."""
    max_total_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens that the KV cache holds. 0: on a GPU, as many as fit; on a CPU, what max_running needs, up to 65,536, or
    one context if that is longer."""
    gpu_memory_fraction: float = pydantic.Field(default=0.85, gt=0, lt=1)
    """Share of the GPU's memory for weights and KV cache. Lower it where the trainer shares the GPU."""
    sglang: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Further settings of SGLang, by the names of its ServerArgs: `attention_backend = "fa3"`, `chunked_prefill_size =
    4096`. Names that SGLang does not know, or that Penstock sets itself, are refused. Their effects are not tested
    here."""

    @pydantic.field_validator("sglang")
    @classmethod
    def _is_not_ours(cls, sglang: dict[str, Any]) -> dict[str, Any]:
        recipe_settings.require_free(sglang)
        return sglang

    @pydantic.model_validator(mode="after")
    def _experts_can_be_divided(self) -> "RolloutConfig":
        if self.expert_parallel not in (1, self.tensor_parallel):
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} is neither 1 nor tensor_parallel = {self.tensor_parallel}; "
                "choose one of these"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _can_generate(self) -> "RolloutConfig":
        if (self.prefill == 0) != (self.decode == 0) and self.replicas == 0:
            present, missing = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ValueError(
                f"{present} = {getattr(self, present)}, but {missing} = 0 and replicas = 0: a prompt is computed by a "
                f"prefill engine and goes on in a decode engine, so nothing would be generated; set {missing} to 1 or "
                "more, or add unified engines with replicas"
            )
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything that an engine process receives."""

    rollout: RolloutConfig
    run: RunConfig
    network: NetworkConfig
    bus: BusConfig
    model: ModelConfig
    float32_head: bool
    """trainer.float32_head: engines and trainer must compute the same logits, or their log-probabilities disagree."""
    router_replay: bool
    """trainer.router_replay: whether engines record which experts compute each token."""
    group_timeout_s: float
    """Maximum seconds to form the process group of a broadcast: trainer.weight_sync.stage_timeout_s, so that engines
    wait as long as the trainer does."""
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
