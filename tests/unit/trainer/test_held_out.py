"""Which replicas an evaluation holds out of pushes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.v1 import common_pb2
from services.trainer.weight_sync.held_out.choice import can_spare, choose_held_out, num_slots
from services.trainer.weight_sync.held_out.hold_out import HoldOut
from tests.support.router.replica_statuses import DECODE, PREFILL, replica

VERSION = 5


def held(replicas: list[common_pb2.Replica], *before: str, num: int = 1) -> list[str]:
    """Ids of the replicas that are held out, if `before` were."""
    return [each.replica_id for each in choose_held_out(replicas, before, num=num, version=VERSION)]


@pytest.mark.parametrize(
    ("num_replicas", "num", "expected"),
    [(0, 1, ""), (1, 1, "a"), (2, 1, "a"), (2, 2, "a"), (4, 2, "ab"), (4, 9, "abc")],
)
def test_one_is_left_for_training_if_there_are_two(num_replicas: int, num: int, expected: str) -> None:
    """With a single one it is held out, and there is none to spare."""
    replicas = [replica(name, version=VERSION) for name in "abcd"[:num_replicas]]
    chosen = choose_held_out(replicas, (), num=num, version=VERSION)
    assert [each.replica_id for each in chosen] == list(expected)
    assert can_spare(replicas, chosen) is (num_replicas >= 2)


def test_replicas_that_are_held_out_stay_so() -> None:
    """Whoever comes; one that died is replaced by the one that loses least: it has the version, or nothing newer."""
    replicas = [
        replica("a", version=9),
        replica("b", version=9),
        replica("c", version=0),
        replica("d", version=VERSION),
    ]
    assert held(replicas, "b") == ["b"]
    assert held(replicas, "gone") == ["d"]
    assert held(replicas[:3], "gone") == ["c"]
    assert held(replicas[:2], "gone") == ["a"]
    assert held(replicas, "b", num=2) == ["b", "d"]
    assert held([replicas[0], replicas[1]], "a", "b", num=2) == ["a"]


def pair_replicas(num_prefill: int, num_decode: int) -> list[common_pb2.Replica]:
    """Prefill replicas p0, ... and decode replicas d0, ..., at the version."""
    return [
        *(replica(f"p{n}", role=PREFILL, version=VERSION) for n in range(num_prefill)),
        *(replica(f"d{n}", role=DECODE, version=VERSION) for n in range(num_decode)),
    ]


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "expected", "spares"),
    [(1, 1, ["d0", "p0"], False), (2, 1, ["d0", "p0"], False), (2, 3, ["d0", "p0"], True), (2, 0, [], False)],
)
def test_of_pairs_both_halves_are_held_out(
    num_prefill: int, num_decode: int, expected: list[str], spares: bool
) -> None:
    """So that the evaluation can be played, and so can training."""
    replicas = pair_replicas(num_prefill, num_decode)
    chosen = choose_held_out(replicas, (), num=1, version=VERSION)
    assert [each.replica_id for each in chosen] == expected
    assert can_spare(replicas, chosen) is spares


def test_the_halves_of_a_pair_fit_together() -> None:
    """A decode replica is no peer of a prefill replica with another transfer back end."""
    other = replica("d0", role=DECODE, version=VERSION, backend="nixl")
    replicas = [*pair_replicas(2, 0), other, replica("d1", role=DECODE, version=VERSION)]
    assert held(replicas) == ["d1", "p0"]


def test_where_pairs_are_left_every_unified_replica_may_be_held_out() -> None:
    """Training has the pairs; slots of prefill replicas generate nothing."""
    replicas = [*pair_replicas(1, 1), replica("u", version=VERSION, max_running=4)]
    chosen = choose_held_out(replicas, (), num=1, version=VERSION)
    assert [each.replica_id for each in chosen] == ["u"]
    assert can_spare(replicas, chosen)
    assert num_slots(chosen) == 4
    assert num_slots(replicas) == 12


async def test_a_claim_waits_for_a_replica_whenever_it_has_none() -> None:
    """Also for the next one, when those that an earlier trainer held out have died before anything was played."""

    async def write(*_: object, **__: object) -> None:
        """Nobody reads it."""

    parts: dict[str, Any] = {
        "kept": SimpleNamespace(version=VERSION, folder=Path("/nowhere")),
        "record": SimpleNamespace(write=write),
    }
    claim = HoldOut(step=4, num=1, replica_ids=frozenset("a"), **parts)
    replicas = [replica("a", version=VERSION), replica("b", version=VERSION)]
    await claim.update(replicas)
    await claim.until_some()
    await claim.update([])
    waiting = asyncio.create_task(claim.until_some())
    await asyncio.sleep(0)
    assert not waiting.done()
    await claim.update(replicas)
    await waiting
    assert claim.num_slots > 0
