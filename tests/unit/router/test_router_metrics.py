"""What a router tells Prometheus about its replicas."""

from services.router.metrics import RouterMetrics
from tests.support.router.replica_statuses import BROKEN, DRAINING, STARTING, UPDATING, replica, slot_pool


async def test_slots_are_those_of_replicas_that_take_calls() -> None:
    """One in a push counts: its calls wait for the end of it. One that starts, is broken or drains takes none."""
    replicas = [replica("ready", max_running=8), replica("pushed", state=UPDATING, max_running=4)]
    unroutable = [
        replica(f"r{number}", state=state, max_running=100) for number, state in enumerate((STARTING, BROKEN, DRAINING))
    ]
    async with slot_pool(*replicas, *unroutable) as (slots, pool, _):
        readings = {metric.name: metric.samples for metric in await RouterMetrics(pool, slots).read()}
    assert [sample.value for sample in readings["penstock_router_routable_replicas"]] == [2]
    assert [sample.value for sample in readings["penstock_router_slots"]] == [8 + 4]
