"""Settings of the rollout engines, section [rollout] of a recipe."""

import pydantic

from penstock.config import Config


class RolloutConfig(Config):
    """How the rollout engines run. Every engine of a run reads the same."""

    replicas: int = pydantic.Field(default=1, ge=0)
    """Engines that `penstock train` starts."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any that is free. With several replicas on one machine it must be 0."""
    advertise_host: str = ""
    """Host name under which others reach this engine; empty: the address it listens on."""

    dtype: str = pydantic.Field(default="auto", pattern="^(auto|float32|bfloat16|float16)$")
    """Of weights and KV cache. auto: on a GPU the checkpoint's own; on a CPU float32 up to 50 million parameters,
    else bfloat16."""
    context_length: int = pydantic.Field(default=0, ge=0)
    """The most tokens of prompt and response together; 0: what the model allows."""
    max_running: int = pydantic.Field(default=64, ge=1)
    """Requests that generate at once."""
    max_queued: int = pydantic.Field(default=256, ge=0)
    """Requests that may wait beside them; more are refused as overloaded."""
    max_total_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens that the KV cache holds; 0: on a GPU what fits, on a CPU what max_running needs, at most 65,536."""
    gpu_memory_fraction: float = pydantic.Field(default=0.85, gt=0, lt=1)
    """Share of the GPU's memory for weights and KV cache. Lower it where the trainer shares the GPU."""

    request_deadline_s: float = pydantic.Field(default=600.0, gt=0)
    """The longest a request may take whose caller sets no deadline of its own."""
    prepare_deadline_s: float = pydantic.Field(default=30.0, gt=0)
    """The longest that forming a weight group may take; all its members must appear within."""
    push_deadline_s: float = pydantic.Field(default=120.0, gt=0)
    """The longest a push may take, from prepare to resume. Then it is given up; if it had touched weights, the replica
    is BROKEN until the next push."""
    grace_s: float = pydantic.Field(default=10.0, ge=0)
    """At the end, how long running requests may take to finish; then other engines play the rest of them."""
