"""Chooses the replica of a call. Pure: no network, no clock (time is passed in), and only immutable views of replicas.

Balancers choose the replica that reads the prompt, a unified or a prefill one, because sessions come back for its
prefix cache. The prefill replica's least loaded partner decodes (`PoolView.find_partner`).
"""

from services.router.balancing.affinity import AffinityBalancer
from services.router.balancing.balancer import Balancer
from services.router.balancing.consistent_hash import ConsistentHashBalancer
from services.router.balancing.pairing import MISMATCHES, NEEDS_NONE, Partners, pair_up
from services.router.balancing.pool_view import Need, NoReplica, PoolView, Query
from services.router.balancing.prefix import PrefixBalancer, hash_blocks
from services.router.balancing.replica_status import PD_ROLES, TRANSIENT, UNBOUNDED, ReplicaStatus, UnroutableReason
from services.router.balancing.round_robin import RoundRobinBalancer
from services.router.config import Balancing
from services.router.tuning import Tuning

__all__ = [
    "MISMATCHES",
    "NEEDS_NONE",
    "PD_ROLES",
    "TRANSIENT",
    "UNBOUNDED",
    "Balancer",
    "Need",
    "NoReplica",
    "Partners",
    "PoolView",
    "Query",
    "ReplicaStatus",
    "UnroutableReason",
    "hash_blocks",
    "make_balancer",
    "pair_up",
]


def make_balancer(name: Balancing, tuning: Tuning) -> Balancer:
    """Return the balancer that `router.balancing` names."""
    match name:
        case Balancing.AFFINITY:
            return AffinityBalancer(max_sessions=tuning.max_sessions)
        case Balancing.PREFIX:
            return PrefixBalancer(max_blocks=tuning.max_prefix_blocks, max_load_ratio=tuning.max_load_ratio)
        case Balancing.ROUND_ROBIN:
            return RoundRobinBalancer()
        case Balancing.CONSISTENT_HASH:
            return ConsistentHashBalancer(max_load_ratio=tuning.max_load_ratio)
