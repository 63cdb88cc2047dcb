"""The states that an engine on a GPU keeps for a model that attends linearly, as SGLang 0.5.23 divides its memory.

A state is what all linear layers know of the tokens before one place of a text. SGLang gives each running request
three, and two more if its prefix cache takes states while requests run (`extra_buffer`), which is its default on GPUs.
It takes memory for all states before it takes any for the KV cache, and for one more state, which no request has
(`KVCacheConfigurator._handle_max_mamba_cache`, `_calculate_mamba_ratio`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import ConfigError
from services.plan.moment import Part
from services.rollout.engine.config import RolloutConfig
from services.trainer.backend.policy.layer_kinds import num_linear_layers

_FLOAT32, _HALF = 4, 2
_DEFAULT_RATIO = 0.9
"""Memory of states by that of the KV cache: SGLang's `mamba_full_memory_ratio`."""
_LEAST_PER_REQUEST = 3
"""States of a request with a prefix cache that takes none while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStates:
    """The states of an engine."""

    size_bytes: int
    """Of a state, on each of the engine's GPUs."""
    num_per_request: int
    num_set: int | None
    """States that the recipe asks for; None: as many as a share of the memory holds."""
    ratio: float
    """Memory of states by that of the KV cache, if no number is set."""
    max_running: int

    @classmethod
    def of(cls, text: Any, rollout: RolloutConfig) -> Self:
        """Return the states of engines.

        Args:
            text: transformers' config of a language model that attends linearly.
            rollout: The settings of the engines.

        Raises:
            ConfigError: the recipe asks for fewer states than one request needs, or for no number of them.
        """
        passed: dict[str, Any] = {name.replace("-", "_"): value for name, value in rollout.sglang.items()}
        num_set = _positive(passed, "max_mamba_cache_size", is_whole=True)
        if num_set is None and passed.get("disable_radix_cache"):
            num_set = rollout.max_running
        per_request = _num_per_request(passed)
        if num_set is not None and num_set < per_request:
            raise ConfigError(
                f"rollout.sglang.max_mamba_cache_size = {num_set:g}: a request needs {per_request} states; set more, "
                "or leave it out"
            )
        return cls(
            size_bytes=_size_bytes(text, rollout, precision=str(passed.get("mamba_ssm_dtype") or "float32")),
            num_per_request=per_request,
            num_set=None if num_set is None else int(num_set),
            ratio=_positive(passed, "mamba_full_memory_ratio") or _DEFAULT_RATIO,
            max_running=rollout.max_running,
        )

    def num_in(self, room_bytes: int) -> int:
        """Return the states for which SGLang takes memory.

        Args:
            room_bytes: What the weights leave of an engine's part of a GPU.
        """
        if self.num_set is not None:
            return self.num_set
        return max(0, int(room_bytes * self.ratio / (1 + self.ratio)) // self.size_bytes - 1)

    def bytes_of(self, num: int) -> int:
        """Return the memory of a number of states."""
        return (num + 1) * self.size_bytes

    def least_parts(self, cache_bytes: int) -> Iterator[Part]:
        """Yield the memory that states take at least, for one request or as many as are set.

        Args:
            cache_bytes: What the KV cache needs at least.
        """
        if self.num_set is not None:
            yield Part(name=f"{self.num_set:,} states of linear attention", size_bytes=self.bytes_of(self.num_set))
            return
        states = self.bytes_of(self.num_per_request)
        yield Part(name=f"{self.num_per_request} states of linear attention, for one request", size_bytes=states)
        more = max(cache_bytes * self.ratio - states, states / self.ratio - cache_bytes)
        yield Part(name=f"what SGLang adds: states have {self.ratio:g} of the KV cache", size_bytes=math.ceil(more))

    def note(self, num: int) -> str:
        """Return how many requests run at once with a number of states."""
        requests = num // self.num_per_request
        text = f"it keeps {num:,} states of {self.size_bytes / 2**20:,.1f} MiB, {self.num_per_request} for each request"
        if requests >= self.max_running:
            return text
        setting = "max_mamba_cache_size" if self.num_set is not None else "mamba_full_memory_ratio"
        return (
            f"{text}: {requests:,} run at once, whatever rollout.max_running = {self.max_running} says; "
            f"rollout.sglang.{setting} gives states more of the memory"
        )


def _positive(passed: dict[str, Any], name: str, *, is_whole: bool = False) -> float | None:
    """Return a number of [rollout.sglang]; None if it is not there."""
    value = passed.get(name)
    if value is None:
        return None
    kinds = int if is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
        raise ConfigError(
            f"rollout.sglang.{name} = {value!r} is no positive {'whole ' if is_whole else ''}number; correct it"
        )
    return value


def _num_per_request(passed: dict[str, Any]) -> int:
    """Return the states that SGLang wants for each running request, given settings in [rollout.sglang]."""
    if passed.get("disable_radix_cache"):
        return 1
    overlaps = not passed.get("disable_overlap_schedule")
    strategy = passed.get("mamba_radix_cache_strategy") or "auto"
    if strategy == "auto":
        has_kernel = (passed.get("linear_attn_backend") or "triton") == "triton"
        strategy = "extra_buffer" if has_kernel and (overlaps or (passed.get("page_size") or 1) > 1) else "no_buffer"
    further = {"no_buffer": 0, "extra_buffer_lazy": 1, "extra_buffer": 2 if overlaps else 1}
    return _LEAST_PER_REQUEST + further.get(strategy, 0)


def _size_bytes(text: Any, rollout: RolloutConfig, *, precision: str) -> int:
    """Return the bytes of a state on each GPU: matrices of all heads, and the last inputs of convolutions."""
    keys = int(text.linear_num_key_heads) * int(text.linear_key_head_dim)
    values = int(text.linear_num_value_heads) * int(text.linear_value_head_dim)
    matrices = values * int(text.linear_key_head_dim) * (_FLOAT32 if precision == "float32" else _HALF)
    windows = (2 * keys + values) * (int(text.linear_conv_kernel_dim) - 1) * _HALF
    return num_linear_layers(text) * (matrices + windows) // rollout.tensor_parallel
