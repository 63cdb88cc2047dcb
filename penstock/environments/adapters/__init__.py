"""Adapters that play other libraries' environments unchanged: those of slime, SkyRL-Gym, TRL and reasoning-gym.

Name one in a recipe under `[worker.environments]`, with the wrapped code in its `args`. They need none of these
libraries. docs/rollouts/environments.md shows one of each.

Invariant: the wrapped code's answers reach the policy unchanged, including the bytes of their images. An answer that
cannot be played ends the episode with an error that names the class, the method, the value and the remedy.
"""

from penstock.environments.adapters.reasoning_gym import ReasoningGymEnvironment
from penstock.environments.adapters.skyrl import SkyRLEnvironment
from penstock.environments.adapters.slime import SlimeEnvironment
from penstock.environments.adapters.trl import TRLEnvironment

__all__ = ["ReasoningGymEnvironment", "SkyRLEnvironment", "SlimeEnvironment", "TRLEnvironment"]
