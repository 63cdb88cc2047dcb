"""What the router learns about a replica from an answer that is cut, or that fails after it has begun."""

import time

from penstock.errors import NotReadyError, PenstockError, UnavailableError
from services.router.slots.breaker import BreakerState
from services.router.slots.replica_slots import ReplicaSlots
from services.router.slots.slot import Slot
from tests.support.router.replica_statuses import Fleet, described


def one_replica() -> ReplicaSlots:
    """The slots of a replica, whose breaker opens after three failures in a row."""
    return Fleet(described("r")).slots["r"]


def take(replica: ReplicaSlots) -> Slot:
    """A slot on it."""
    return Slot(replica, lambda _: None, time.monotonic)


def cut(replica: ReplicaSlots) -> None:
    """A call whose answer is cut once it has begun, as by a stop text, a first tool call or its client."""
    slot = take(replica)
    slot.begin_answer()
    slot.release()


async def fail(replica: ReplicaSlots, error: PenstockError, *, has_begun: bool = False) -> None:
    """A call that fails, perhaps in the middle of its answer."""
    slot = take(replica)
    if has_begun:
        slot.begin_answer()
    await slot.fail(error, is_prefill=False)
    slot.release()


async def test_failures_between_answers_that_are_cut_are_not_in_a_row() -> None:
    """However many there are over the life of a replica."""
    replica = one_replica()
    for _ in range(5):
        await fail(replica, UnavailableError("gone"))
        assert replica.breaker_state is BreakerState.CLOSED
        cut(replica)


async def test_a_replica_that_dies_in_the_middle_of_each_answer_gets_no_more_calls() -> None:
    """That its answers begin is no success."""
    replica = one_replica()
    for _ in range(3):
        await fail(replica, UnavailableError("gone"), has_begun=True)
    assert replica.breaker_state is BreakerState.OPEN


async def test_a_call_that_leaves_before_its_answer_says_nothing() -> None:
    """Its replica may be about to fail it."""
    replica = one_replica()
    for _ in range(3):
        await fail(replica, UnavailableError("gone"))
        take(replica).release()
    assert replica.breaker_state is BreakerState.OPEN


async def test_a_replica_whose_answer_is_cut_no_longer_rejects_calls() -> None:
    """Its next rejection is the first one again, and costs the shortest pause."""
    replica = one_replica()
    for _ in range(4):
        await fail(replica, NotReadyError("no images"))
    cut(replica)
    assert replica.num_rejections == 0


async def test_an_answer_cut_after_the_breaker_opened_does_not_close_it() -> None:
    """It began before the failures, and says nothing about the present."""
    replica = one_replica()
    slot = take(replica)
    slot.begin_answer()
    for _ in range(3):
        await fail(replica, UnavailableError("gone"))
    slot.release()
    assert replica.breaker_state is BreakerState.OPEN
