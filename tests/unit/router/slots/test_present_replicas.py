"""The replicas that hold a lease, and what is known of them together."""

from typing import Any

import pytest

from penstock.bus.buckets.replica_lease import write_replica
from services.router.balancing import pair_up
from services.router.forwarder import RequestForwarder
from services.router.slots import present_replicas
from services.router.tuning import Tuning
from tests.support.router.replica_statuses import replica, slot_pool


async def test_a_pool_is_measured_when_a_lease_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each look, of which there are many without a change; a replica that comes or goes changes it too."""
    num_measured = 0

    def counted(leases: Any) -> Any:
        nonlocal num_measured
        num_measured += 1
        return pair_up(leases)

    monkeypatch.setattr(present_replicas, "pair_up", counted)
    async with slot_pool(replica("a", max_tokens=10), replica("b", max_tokens=20)) as (some, pool, leases):
        for change, num, largest in (
            (lambda: None, 0, 20),
            (lambda: leases.put(replica("a", max_tokens=30)), 1, 30),
            (lambda: None, 0, 30),
            (lambda: leases.put(replica("c", max_tokens=40)), 1, 40),
            (lambda: leases.values.pop("c"), 1, 30),
        ):
            change()
            num_measured = 0
            pool.refresh()
            assert (num_measured, some.present.largest) == (num, largest)


async def test_the_context_length_stays_known_while_there_is_no_replica() -> None:
    """So that prompts that cannot fit are refused before they are tokenised, as an engine restarts, too. Of engines
    that leave one after the other, the largest counts: it may come back."""
    async with slot_pool() as (some, pool, leases):
        forwarder = RequestForwarder(some, Tuning())
        for sizes, known in (
            ({}, None), ({"a": 20}, 20), ({}, 20),
            ({"a": 30, "b": 10}, 30), ({"b": 10}, 10), ({}, 30),
            ({"b": 10}, 10), ({}, 10),
            ({"c": 0}, None), ({}, None),
        ):  # fmt: skip
            leases.values = {name: write_replica(replica(name, max_tokens=size)) for name, size in sizes.items()}
            pool.refresh()
            assert forwarder.context_length == known
