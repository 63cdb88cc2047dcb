"""Which replica gets a call. Pure: no network, and no clock: time is passed in.

Policies choose who reads the prompt: a unified or a prefill replica, for its prefix cache is what a session comes back
for. Who decodes for a prefill replica is not theirs to choose: it is the least loaded of its partners (`pairing`).

Invariant: a replica that a policy chooses is alive, able to take calls, large enough and at least of the wanted policy
version; a prefill replica has a partner of which the same is true.
"""

from services.router.balancing.affinity import AffinityBalancer
from services.router.balancing.balancer import Balancer
from services.router.balancing.consistent_hash import ConsistentHashBalancer
from services.router.balancing.pairing import MISMATCHES, largest, pair_up, sizes
from services.router.balancing.prefix import PrefixBalancer, hash_blocks
from services.router.balancing.replica_status import (
    PASSING,
    NoReplica,
    Query,
    ReplicaStatus,
    UnroutableReason,
    explain,
    find_reason,
)
from services.router.balancing.round_robin import RoundRobinBalancer
from services.router.config import BalancingName, RouterConfig

__all__ = [
    "MISMATCHES",
    "PASSING",
    "Balancer",
    "NoReplica",
    "Query",
    "ReplicaStatus",
    "UnroutableReason",
    "explain",
    "find_reason",
    "hash_blocks",
    "largest",
    "make_balancer",
    "pair_up",
    "sizes",
]


def make_balancer(config: RouterConfig) -> Balancer:
    """The policy that `router.balancing` names."""
    if config.balancing is BalancingName.PREFIX:
        return PrefixBalancer(max_blocks=config.max_prefix_blocks, max_load_ratio=config.max_load_ratio)
    if config.balancing is BalancingName.ROUND_ROBIN:
        return RoundRobinBalancer()
    if config.balancing is BalancingName.CONSISTENT_HASH:
        return ConsistentHashBalancer(max_load_ratio=config.max_load_ratio)
    return AffinityBalancer(max_sessions=config.max_sessions)
