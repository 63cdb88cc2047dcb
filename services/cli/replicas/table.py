"""Shows the router's pool: as a table for people, as plain values for programs."""

import asyncio
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.clients import RouterClient
from penstock.runtime.security import Security
from penstock.v1 import common_pb2, router_pb2
from services.cli.console import open_console

_TIMEOUT_S = 10.0


def fetch_pool(address: str, security: Security) -> router_pb2.ListReplicasResponse:
    """Ask the router at `address` for its pool.

    Raises:
        UnavailableError: the router does not answer.
    """

    async def fetch() -> router_pb2.ListReplicasResponse:
        async with RouterClient(address, security=security) as client:
            return await client.list_replicas(timeout_s=_TIMEOUT_S)

    return asyncio.run(fetch())


def drain(
    address: str, replica_id: str, *, grace_s: float, security: Security
) -> router_pb2.RouterServiceDrainReplicaResponse:
    """Have the router at `address` drain a replica, and wait until it is empty.

    Raises:
        InvalidRequestError: no such replica holds a lease.
        UnavailableError: the router or the replica does not answer.
    """

    async def drain_replica() -> router_pb2.RouterServiceDrainReplicaResponse:
        async with RouterClient(address, security=security) as client:
            return await client.drain_replica(replica_id, grace_s=grace_s, timeout_s=grace_s + _TIMEOUT_S)

    return asyncio.run(drain_replica())


def describe_pool(pool: router_pb2.ListReplicasResponse) -> dict[str, Any]:
    """Return the pool as plain values, for JSON."""
    return {
        "published_version": pool.published_version,
        "min_policy_version": pool.min_policy_version,
        "num_waiting": pool.num_waiting,
        "num_waiting_bytes": pool.num_waiting_bytes,
        "replicas": [_describe(each) for each in pool.replicas],
    }


def print_pool(pool: router_pb2.ListReplicasResponse) -> None:
    """Write the pool as a table to standard output."""
    open_console().print(draw_pool(pool))


def draw_pool(pool: router_pb2.ListReplicasResponse) -> Table:
    """Return the pool as a table that fits 80 columns."""
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        caption=f"published version {pool.published_version}, oldest allowed {pool.min_policy_version}, "
        f"{pool.num_waiting} calls waiting ({pool.num_waiting_bytes / 2**20:.1f} MiB)",
        caption_justify="left",
    )
    for heading in ("replica", "role", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("version", "load", "KV", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("takes calls")
    for row in map(_describe, pool.replicas):
        table.add_row(
            Text(row["replica_id"]),
            row["role"],
            row["state"],
            str(row["policy_version"]),
            f"{row['load']:.2f}",
            f"{row['kv_use']:.0%}",
            f"{row['num_in_flight']}/{row['limit']}",
            Text(_describe_routability(row)),
        )
    return table


def _describe_routability(row: dict[str, Any]) -> str:
    answer = "yes" if row["routable"] else f"no: {row['reason']}"
    return answer if row["breaker"] == "closed" else f"{answer} (breaker {row['breaker']})"


def _describe(routed: router_pb2.RoutedReplica) -> dict[str, Any]:
    replica = routed.replica
    return {
        "replica_id": replica.replica_id,
        "address": replica.address,
        "role": _lowered(common_pb2.ReplicaRole.Name(replica.role), "REPLICA_ROLE_"),
        "state": _lowered(common_pb2.ReplicaState.Name(replica.state), "REPLICA_STATE_"),
        "policy_version": replica.policy_version,
        "load": round(routed.load, 4),
        "kv_use": round(replica.kv_use, 4),
        "num_running": replica.num_running,
        "num_queued": replica.num_queued,
        "max_running": replica.max_running,
        "num_in_flight": routed.num_in_flight,
        "limit": routed.limit,
        "breaker": _lowered(router_pb2.BreakerState.Name(routed.breaker), "BREAKER_STATE_").replace("_", "-"),
        "routable": routed.routable,
        "reason": routed.unroutable_reason,
    }


def _lowered(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
