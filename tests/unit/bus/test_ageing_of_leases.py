"""How a watched value ages, on a clock that the test sets."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js import api
from nats.js.kv import KeyValue

from penstock.bus.buckets import watch as module
from penstock.bus.buckets.watch import Watch

TTL_S = 3.0


class Bucket:
    """Its leader answers while it works."""

    works = True
    takes_s = 0.0
    cluster: api.ClusterInfo | None = None

    async def status(self) -> Any:
        module.time.at += self.takes_s  # type: ignore[attr-defined]
        if not self.works:
            raise TimeoutError
        return SimpleNamespace(stream_info=SimpleNamespace(cluster=self.cluster))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`at` is what the watch takes for now."""
    made = SimpleNamespace(at=0.0, monotonic=lambda: made.at)
    monkeypatch.setattr(module, "time", made)
    return made


def renewal(revision: int) -> KeyValue.Entry:
    return KeyValue.Entry("leases", "r", b"x", revision, None, None, None)


def deletion(key: str) -> KeyValue.Entry:
    return KeyValue.Entry("leases", key, None, 9, None, None, "DEL")


async def test_a_renewal_that_is_late_when_an_outage_begins_costs_no_lease(clock: Any) -> None:
    """What passes until the outage is noticed is no time in which it could have been renewed."""
    bucket = Bucket()
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    for clock.at in (1.0, 1.9):
        await watch._ask_leader()
    bucket.works = False
    for clock.at in (2.0, 3.1, 3.4, 20.0):
        assert watch.values == {"r": b"x"}, clock.at
        with pytest.raises(TimeoutError):
            await watch._ask_leader()
    bucket.works = True
    await watch._ask_leader()
    for clock.at in (21.4, 22.9):
        await watch._ask_leader()
        assert watch.values == {"r": b"x"}, "it has its whole time again"
    clock.at = 23.1
    await watch._ask_leader()
    assert watch.values == {}


@pytest.mark.parametrize("leader", ["nats-0", ""])
async def test_an_answer_that_is_not_the_leaders_shows_no_work(clock: Any, leader: str) -> None:
    """While a young stream elects one, the server that was to lead it at first answers; it knows the dead one still."""
    bucket = Bucket()
    others = [api.PeerInfo(name=name, active=10**9, current=True) for name in ("nats-0", "nats-1")]
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    bucket.cluster = api.ClusterInfo(leader=leader, replicas=others)
    for clock.at in (1.5, 3.0, 4.5):
        with pytest.raises(TimeoutError, match="has no leader"):
            await watch._ask_leader()
        assert watch.values == {"r": b"x"}
    bucket.cluster = api.ClusterInfo(leader="nats-2", replicas=others)
    clock.at = 5.0
    await watch._ask_leader()
    assert watch.values == {"r": b"x"}, "it has its whole time again"


async def test_under_a_leader_that_is_cut_off_no_lease_ages(clock: Any) -> None:
    """It answers as before, and says how long ago it heard from the others; what it is sent it cannot store."""
    bucket = Bucket()
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    for clock.at, heard_s in ((1.0, 0.9), (2.0, 1.9), (2.9, 2.8)):
        age = int(heard_s * 1e9)
        others = [api.PeerInfo(name=name, active=age, current=True) for name in ("nats-0", "nats-1")]
        bucket.cluster = api.ClusterInfo(leader="nats-2", replicas=others)
        await watch._ask_leader()
    for clock.at in (4.0, 12.0):
        for peer in others:
            peer.active = int(clock.at * 1e9)
        with pytest.raises(TimeoutError, match="reaches a majority"):
            await watch._ask_leader()
        assert watch.values == {"r": b"x"}
    assert watch._now() == pytest.approx(2.1), "two seconds after the others were heard last"


async def test_what_is_not_renewed_while_the_bucket_works_lapses(clock: Any) -> None:
    """As soon as the leader answers after its time."""
    watch = Watch(Bucket(), ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    for clock.at in (1.0, 2.0, 2.9):
        await watch._ask_leader()
        assert watch.values == {"r": b"x"}
    clock.at = 3.0
    await watch._ask_leader()
    assert watch.values == {}


async def test_what_others_do_shows_that_the_bucket_works(clock: Any) -> None:
    """Their renewals and their ends."""
    watch = Watch(Bucket(), ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    for revision, key in enumerate(("s", "t"), start=2):
        watch._store(dataclasses.replace(renewal(revision), key=key))
    for clock.at, entry in ((1.4, deletion("s")), (2.8, deletion("t"))):
        watch._store(entry)
        assert set(watch.values) >= {"r"}
    clock.at = 3.1
    watch._store(dataclasses.replace(renewal(7), key="u"))
    assert set(watch.values) == {"u"}


async def test_leases_of_the_dead_are_forgotten(clock: Any) -> None:
    """Engines that are killed leave theirs, and come back under new keys, for as long as the run goes on."""
    watch = Watch(Bucket(), ttl_s=TTL_S)  # type: ignore[arg-type]
    for number in range(100):
        clock.at += 1.0
        watch._store(dataclasses.replace(renewal(number + 1), key=f"r{number}"))
    assert [*watch.values] == ["r97", "r98", "r99"]
    assert len(watch._values) <= 2 * TTL_S + 1


async def test_a_renewal_is_no_change(clock: Any) -> None:
    """Nobody looks at hundreds of leases because one has its whole time again; one that had lapsed is news."""
    watch = Watch(Bucket(), ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    known = watch.num_changes
    for revision, clock.at in enumerate((2.0, 4.0), start=2):
        watch._store(renewal(revision))
        assert (watch.values, watch.num_changes) == ({"r": b"x"}, known)
    for clock.at in (5.0, 6.0, 7.0):
        await watch._ask_leader()
    assert watch.values == {}
    watch._store(renewal(4))
    assert watch.values == {"r": b"x"}
    assert watch.num_changes > known
    known = watch.num_changes
    watch._store(dataclasses.replace(renewal(5), value=b"y"))
    assert watch.num_changes > known


async def test_what_has_no_time_to_live_is_kept(clock: Any) -> None:
    """However many keys there are."""
    watch = Watch(Bucket())  # type: ignore[arg-type]
    for number in range(100):
        clock.at += 1000.0
        watch._store(dataclasses.replace(renewal(number + 1), key=f"r{number}"))
    assert len(watch.values) == 100


async def test_an_outage_brings_no_lapsed_lease_back(clock: Any) -> None:
    """Its engine died long before; only the lease that was alive has its whole time again."""
    bucket = Bucket()
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    for revision, clock.at in enumerate((1.0, 2.0, 3.0), start=2):
        watch._store(dataclasses.replace(renewal(revision), key="s"))
    assert set(watch.values) == {"s"}
    bucket.works = False
    clock.at = 4.0
    with pytest.raises(TimeoutError):
        await watch._ask_leader()
    bucket.works = True
    clock.at = 20.0
    await watch._ask_leader()
    assert set(watch.values) == {"s"}


async def test_silence_is_no_time_to_live(clock: Any) -> None:
    """Beyond the time after which the watch asks, it counts as an outage."""
    watch = Watch(Bucket(), ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    clock.at = 2.5
    await watch._ask_leader()
    clock.at = 3.9
    await watch._ask_leader()
    assert watch.values == {"r": b"x"}, "1.5 s and 1.4 s of it count"
    clock.at = 4.1
    await watch._ask_leader()
    assert watch.values == {}


async def test_a_question_that_waits_for_an_election_shows_an_outage(clock: Any) -> None:
    """It was asked in time, and answered by the new leader just before the lease was over. The server has dropped
    the lease meanwhile, and its holder has not renewed it yet."""
    bucket = Bucket()
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    clock.at, bucket.takes_s = 1.5, 1.4
    await watch._ask_leader()
    bucket.takes_s = 0.0
    for clock.at in (4.4, 5.8):
        await watch._ask_leader()
        assert watch.values == {"r": b"x"}, "it has its whole time again"
    clock.at = 6.0
    await watch._ask_leader()
    assert watch.values == {}


async def test_under_a_leader_that_is_always_slow_leases_lapse(clock: Any) -> None:
    """The first slow answer may be the end of an outage, those after it are not."""
    bucket = Bucket()
    watch = Watch(bucket, ttl_s=TTL_S)  # type: ignore[arg-type]
    watch._store(renewal(1))
    bucket.takes_s = 1.2
    for clock.at in (1.0, 2.5):
        await watch._ask_leader()
        assert watch.values == {"r": b"x"}
    clock.at = 4.0
    await watch._ask_leader()
    assert watch.values == {}
