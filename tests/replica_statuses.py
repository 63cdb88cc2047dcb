"""Replicas as the router's policies see them, made up."""

from penstock.v1 import common_pb2
from services.router.balancing import Balancer, Query, ReplicaStatus, pair_up
from services.router.breaker import Breaker
from services.router.config import BreakerConfig, LimitConfig
from services.router.limits import Limit

READY = common_pb2.REPLICA_STATE_READY
UPDATING = common_pb2.REPLICA_STATE_UPDATING
DRAINING = common_pb2.REPLICA_STATE_DRAINING
UNIFIED = common_pb2.REPLICA_ROLE_UNIFIED
PREFILL = common_pb2.REPLICA_ROLE_PREFILL
DECODE = common_pb2.REPLICA_ROLE_DECODE

Pool = dict[str, ReplicaStatus]


def replica(
    replica_id: str = "a",
    *,
    state: int = READY,
    version: int = 0,
    running: int = 0,
    queued: int = 0,
    max_running: int = 8,
    role: int = UNIFIED,
    backend: str = "mooncake",
    tensor_parallel: int = 1,
    max_tokens: int = 0,
) -> common_pb2.Replica:
    described = common_pb2.Replica(
        replica_id=replica_id,
        role=role,
        state=state,
        policy_version=version,
        num_running=running,
        num_queued=queued,
        max_running=max_running,
        max_tokens=max_tokens,
    )
    if role in (PREFILL, DECODE) and backend:
        described.disaggregation.transfer_backend = backend
        described.disaggregation.tensor_parallel = tensor_parallel
    return described


def candidate(
    replica_id: str, *, in_flight: int = 0, failing: bool = False, refusing: bool = False, factor: float = 2.0, **fields
) -> ReplicaStatus:
    lease = replica(replica_id, **fields)
    limit = Limit(LimitConfig(factor=factor), lease.max_running)
    made = ReplicaStatus(lease, limit=limit, breaker=Breaker(BreakerConfig()))
    made.num_in_flight = in_flight
    made.refusing_until = 1.0 if refusing else 0.0
    if failing:
        made.breaker.fail(0.0, probe=False, unreachable=True)
    return made


def pool_of(*candidates: ReplicaStatus) -> Pool:
    pair_up(candidates)
    return {each.replica_id: each for each in candidates}


def chosen(policy: Balancer, pool: Pool, query: Query | None = None) -> str | None:
    """Choose and record, as the router does."""
    query = query or Query()
    picked = policy.choose(query, pool, 0.0)
    if picked is None:
        return None
    policy.record(query, picked.replica_id)
    return picked.replica_id
