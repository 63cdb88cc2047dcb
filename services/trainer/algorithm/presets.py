"""Algorithms by name: the values of the axes that each sets. Everything else has the axis's default."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Truncated importance sampling between trainer and engine: Yao et al. 2025, "Your Efficient RL Framework
        # Secretly Brings You Off-Policy RL Training".
        "tis": {"anchor": "proximal", "correction": {"kind": "truncate", "high": 2.0}},
        # PPO against the engine: Schulman et al. 2017, eq. 7.
        "ppo": {"anchor": "rollout", "trust_region": {"kind": "clip"}},
    }
)
