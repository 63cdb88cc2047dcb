"""Environments that other libraries' classes can be played through, unchanged: those of slime, SkyRL-Gym, TRL
and reasoning-gym.

Each is a class to name in a recipe under `[worker.environments]`; what it wraps is in its `args`. They need none of
these libraries. docs/rollouts/environments.md shows one of each.

Invariant: what the wrapped code answers reaches the policy as it is, the bytes of its images included; what cannot
be played ends the episode with an error that names the class, the method, the value and the remedy.
"""

from penstock.environments.adapters.reasoning_gym import ReasoningGymEnvironment
from penstock.environments.adapters.skyrl import SkyRLEnvironment
from penstock.environments.adapters.slime import SlimeEnvironment
from penstock.environments.adapters.trl import TRLEnvironment

__all__ = ["ReasoningGymEnvironment", "SkyRLEnvironment", "SlimeEnvironment", "TRLEnvironment"]
