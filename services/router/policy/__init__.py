"""Which replica gets a call. Pure: no network, and no clock: time is passed in.

Policies choose who reads the prompt: a unified or a prefill replica, for its prefix cache is what a session comes back
for. Who decodes for a prefill replica is not theirs to choose: it is the least loaded of its partners (`pairing`).

Invariant: a replica that a policy chooses is alive, able to take calls, large enough and at least of the wanted policy
version; a prefill replica has a partner of which the same is true.
"""

from services.router.config import PolicyName, RouterConfig
from services.router.policy.affinity import AffinityPolicy
from services.router.policy.candidate import (
    PASSING,
    Candidate,
    NoReplica,
    Obstacle,
    Query,
    explain,
    find_obstacle,
)
from services.router.policy.choice import Policy
from services.router.policy.consistent_hash import ConsistentHashPolicy
from services.router.policy.pairing import MISMATCHES, largest, pair_up, sizes
from services.router.policy.prefix import PrefixPolicy, hash_blocks
from services.router.policy.round_robin import RoundRobinPolicy

__all__ = [
    "MISMATCHES",
    "PASSING",
    "Candidate",
    "NoReplica",
    "Obstacle",
    "Policy",
    "Query",
    "explain",
    "find_obstacle",
    "hash_blocks",
    "largest",
    "make_policy",
    "pair_up",
    "sizes",
]


def make_policy(config: RouterConfig) -> Policy:
    """The policy that `router.policy` names."""
    if config.policy is PolicyName.PREFIX:
        return PrefixPolicy(max_blocks=config.max_prefix_blocks, max_load_ratio=config.max_load_ratio)
    if config.policy is PolicyName.ROUND_ROBIN:
        return RoundRobinPolicy()
    if config.policy is PolicyName.CONSISTENT_HASH:
        return ConsistentHashPolicy(max_load_ratio=config.max_load_ratio)
    return AffinityPolicy(max_sessions=config.max_sessions)
