"""WeightReceiver.update: the stages that an engine takes in one call, and what it does with other weights."""

from collections.abc import AsyncIterator

import pytest

from penstock.errors import ChecksumError
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import REPLICA_STATE_BROKEN, REPLICA_STATE_READY
from tests.support.waiting import until
from tests.support.weights.recorded_sink import (
    DIGESTS,
    MANIFEST,
    RecordedSink,
    close_receivers,
    group,
    push,
    receiver,
)


@pytest.fixture(autouse=True)
async def _receivers_are_closed() -> AsyncIterator[None]:
    yield
    await close_receivers()


@pytest.mark.parametrize("held", [{"a": 7, "b": 8}, {"a": 7}])
async def test_other_weights_than_those_that_were_sent_are_not_served(held: dict[str, int]) -> None:
    """One value differs, or a parameter is missing: the error names it, and the next push heals."""
    sink = RecordedSink()
    one = await receiver(sink)
    sink.held = held
    with pytest.raises(ChecksumError, match=r"differ after the push in 1 parameters: \['b'\]$"):
        await push(one, "p1", 1)
    assert (one.state, one.version) == (REPLICA_STATE_BROKEN, 0)
    assert "resume" not in sink.calls
    sink.held = DIGESTS
    await push(one, "p2", 1, group_name="g2")
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)


async def test_stages_of_an_update_are_told_as_they_end() -> None:
    """The trainer sees where one hangs."""
    sink = RecordedSink()
    one = await receiver(sink)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    told = []
    async for stage in one.update("p1", rollout_pb2.PAUSE_MODE_RETRACT, 0.0, DIGESTS):
        told.append((stage, sink.calls[-1]))
    assert told == [(rollout_pb2.UPDATE_STAGE_PAUSED, "pause"), (rollout_pb2.UPDATE_STAGE_RECEIVED, "end")]
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)


async def test_an_update_that_announces_its_push_prepares_first() -> None:
    """And says so before it pauses."""
    sink = RecordedSink()
    one = await receiver(sink)
    announced = one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    told = []
    async for stage in one.update("p1", rollout_pb2.PAUSE_MODE_RETRACT, 0.0, DIGESTS, announced=announced):
        told.append((stage, sink.calls[-1]))
    assert told == [
        (rollout_pb2.UPDATE_STAGE_PREPARED, "join g1"),
        (rollout_pb2.UPDATE_STAGE_PAUSED, "pause"),
        (rollout_pb2.UPDATE_STAGE_RECEIVED, "end"),
    ]
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)


@pytest.mark.parametrize(
    ("stage", "state"),
    [
        (rollout_pb2.UPDATE_STAGE_PREPARED, REPLICA_STATE_READY),
        (rollout_pb2.UPDATE_STAGE_PAUSED, REPLICA_STATE_READY),
        (rollout_pb2.UPDATE_STAGE_RECEIVED, REPLICA_STATE_BROKEN),
    ],
)
async def test_an_update_whose_call_ends_between_two_stages_ends(stage: int, state: int) -> None:
    """The trainer dies there: the engine generates on, or is BROKEN, without waiting for the push's deadline."""
    one = await receiver(RecordedSink())
    announced = one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    update = one.update("p1", rollout_pb2.PAUSE_MODE_RETRACT, 0.0, DIGESTS, announced=announced)
    while await anext(update) != stage:
        pass
    await update.aclose()
    await until(lambda: not one.is_busy)
    assert one.state == state
