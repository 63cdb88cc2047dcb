"""Configuration: frozen pydantic models, read from TOML recipes with `--section.key=value` overrides.

All processes of a run read the same recipe, so a mistyped key fails in each of them before anything starts.
A service's own section is defined beside the service; shared sections are in `sections`.
"""

from penstock.config.base import Config
from penstock.config.loading import dump, load, split_override
from penstock.config.sections import (
    BusConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    ModelPath,
    NetworkConfig,
    RunConfig,
    SamplingConfig,
    SecurityConfig,
    TraceConfig,
)

__all__ = [
    "BusConfig",
    "Config",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "ModelPath",
    "NetworkConfig",
    "RunConfig",
    "SamplingConfig",
    "SecurityConfig",
    "TraceConfig",
    "dump",
    "load",
    "split_override",
]
