"""Presets: the values that each named algorithm sets. Everything else has the axis's default.

docs/training/algorithms.md lists the differences from each system that cannot be expressed here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_CLIP = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2}
_CLIP_HIGHER = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28}
_TRUNCATE = {"kind": "truncate", "level": "token", "high": 2.0}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Truncated importance sampling between trainer and engine: Yao et al. 2025, "Your Efficient RL Framework
        # Secretly Brings You Off-Policy RL Training".
        "tis": {"anchor": "proximal", "correction": _TRUNCATE},
        # Schulman et al. 2017, "Proximal Policy Optimization", eq. 7, with the engine as the old policy.
        "ppo": {"anchor": "rollout", "trust_region": _CLIP},
        # Fu et al. 2025, "AReaL", section 5.2, with the log-linear proximal policy of its documentation.
        "decoupled_ppo": {
            "anchor": "log_linear",
            "advantage": {"kind": "grpo", "norm": "batch"},
            "trust_region": {"kind": "clip", "clip_low": 0.4, "clip_high": 0.4},
            "correction": {"kind": "mask", "level": "token", "high": 5.0},
        },
        # prime-rl's default; "Rethinking the Trust Region in LLM RL", arXiv 2602.04879.
        "dppo": {
            "anchor": "rollout",
            "advantage": {"kind": "dr_grpo"},
            "trust_region": {"kind": "dppo_tv", "tv_low": 0.2, "tv_high": 0.2},
            "drift": 1e-3,
        },
        # Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071.
        "gspo": {
            "anchor": "rollout",
            "ratio": "sequence",
            "trust_region": {"kind": "clip", "clip_low": 3e-4, "clip_high": 4e-4},
            "aggregation": {"kind": "sequence"},
        },
        # MiniMax 2025, "MiniMax-M1", arXiv 2506.13585, in the form of Khatri et al. 2025, "The Art of Scaling RL
        # Compute for LLMs" (ScaleRL), arXiv 2510.13786.
        "cispo": {
            "anchor": "rollout",
            "advantage": {"kind": "dr_grpo", "norm": "batch_std"},
            "trust_region": {"kind": "cispo", "ratio_low": 0.0, "ratio_high": 5.0},
            "aggregation": {"kind": "prompt"},
        },
        # Ling team 2025, "Every Step Evolves" (Ring-1T), arXiv 2510.18855.
        "icepop": {"anchor": "proximal", "correction": {"kind": "mask", "level": "token", "low": 0.5, "high": 5.0}},
        # Zheng et al. 2025, "Prosperity before Collapse", arXiv 2510.01161.
        "m2po": {"anchor": "rollout", "rejection": {"kind": "m2po", "max_m2": 0.04}},
        # Yu et al. 2025, "DAPO", arXiv 2503.14476.
        "dapo": {"anchor": "rollout", "trust_region": _CLIP_HIGHER, "aggregation": {"kind": "token"}},
        # slime's defaults for a vision-language run: its old policy is the trainer's own, its loss a mean of means.
        "slime_geo3k": {"anchor": "proximal", "trust_region": _CLIP_HIGHER, "aggregation": {"kind": "sequence"}},
        # RLinf's Qwen3-VL run on Geometry3K.
        "rlinf_geo3k": {
            "anchor": "proximal",
            "trust_region": _CLIP_HIGHER,
            "correction": _TRUNCATE,
            "aggregation": {"kind": "sequence"},
        },
    }
)
