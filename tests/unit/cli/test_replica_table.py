"""The table of the pool, as a person sees it."""

import io

from rich.console import Console

from penstock.v1 import common_pb2, router_pb2
from services.cli.replicas import table as replica_table
from services.router.balancing import UnroutableReason


def test_the_table_fits_a_narrow_terminal() -> None:
    """Eighty columns: ids are whole, for one has to be typed to drain it, and so is every word of a reason."""
    pool = router_pb2.ListReplicasResponse(published_version=1200, min_policy_version=1196, num_waiting=7)
    for number, reason in enumerate(("", UnroutableReason.OTHER_TENSOR_PARALLEL.value, "failing or not reachable")):
        pool.replicas.add(
            replica=common_pb2.Replica(
                replica_id=f"engine-0123456789{number:02}",
                role=common_pb2.REPLICA_ROLE_UNIFIED,
                state=common_pb2.REPLICA_STATE_UPDATING,
                policy_version=1200,
                kv_use=1.0,
            ),
            routable=not reason,
            unroutable_reason=reason,
            num_in_flight=1024,
            limit=1536,
            load=12.34,
            breaker=router_pb2.BREAKER_STATE_CLOSED,
        )
    pool.replicas[2].breaker = router_pb2.BREAKER_STATE_HALF_OPEN
    output = io.StringIO()
    Console(file=output, width=80).print(replica_table.draw_pool(pool))
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for word in ("engine-012345678901", "unified", "updating", "1200", "12.34", "100%", "1024/1536", "half-open"):
        assert word in text
    for word in ("yes", "no:", "SGLang", "cannot", "cache", "failing", "reachable"):
        assert word in text.split()
    assert "published version 1200, oldest allowed 1196, 7 calls waiting" in text
