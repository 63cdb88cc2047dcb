"""Bars of `make churn`: load and even share are counted over the same time."""

import pytest

from bench.support.churn_measures import Life, Turn, shares


def call(started_at: float, ended_at: float, *replica_ids: str) -> list[Turn]:
    """A session of one call."""
    return [Turn(started_at=started_at, ended_at=ended_at, replica_ids=list(replica_ids))]


def test_calls_that_outlast_the_measurement_count_until_its_end() -> None:
    """Two equal replicas with a call each have an even load, though one call goes on for another five seconds."""
    lives = [Life(replica_id=name, max_running=8, came_at=0.0) for name in ("r1", "r2")]
    found = shares(lives, [call(0.0, 15.0, "r1"), call(0.0, 10.0, "r2")], until=10.0)
    assert [share.load for share in found] == pytest.approx([1.0, 1.0])
    assert [share.lived_s for share in found] == [10.0, 10.0]


def test_what_a_replica_does_while_it_leaves_is_no_load() -> None:
    """Neither its own nor a part of what the others should share."""
    lives = [
        Life(replica_id="leaves", max_running=8, came_at=0.0, left_at=5.0),
        Life(replica_id="stays", max_running=8, came_at=0.0),
    ]
    found = shares(lives, [call(0.0, 7.0, "leaves"), call(0.0, 10.0, "stays")], until=10.0)
    assert {share.life.replica_id: share.load for share in found} == pytest.approx({"leaves": 1.0, "stays": 1.0})


def test_a_call_that_goes_on_elsewhere_counts_there_until_the_measurement_ends() -> None:
    """The first replica has it until it is killed, the second one from then on."""
    lives = [
        Life(replica_id="killed", max_running=8, came_at=0.0, left_at=4.0),
        Life(replica_id="next", max_running=8, came_at=0.0),
    ]
    found = shares(lives, [call(0.0, 12.0, "killed", "next"), call(0.0, 10.0, "next")], until=10.0)
    assert {share.life.replica_id: share.load for share in found} == pytest.approx({"killed": 1.0, "next": 1.0})
