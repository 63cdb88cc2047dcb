"""Leases and watches on a real nats-server: the dead vanish within seconds, the living do not."""

import asyncio
import contextlib
import dataclasses
import itertools
import signal
import sys
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import nats.errors
import pytest
from nats.js import JetStreamContext, api
from nats.js.api import ConsumerInfo
from nats.js.kv import KeyValue

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.errors import SetupError
from penstock.testing.freezing import frozen
from tests.support import waiting
from tests.support.waiting import HANG_S, promptly

TTL_S = 1.0

_HOLD_A_LEASE = """
import asyncio, sys
from penstock.bus.connection import connect
from penstock.bus.buckets.leases import held
from penstock.config import BusConfig

async def main(url, run):
    async with connect(BusConfig(url=url, lease_ttl_s=1.0), run=run) as bus:
        bucket = await bus.bucket("leases", ttl_s=1.0)
        async with held(bucket, "trainer", lambda: b"first", ttl_s=1.0):
            sys.stdout.write("holding\\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def killed_at_the_end(url: str, run: str):
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLD_A_LEASE, url, run, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await promptly(holder.stdout.readline()) == b"holding\n"
    try:
        yield holder
    finally:
        if holder.returncode is None:
            holder.send_signal(signal.SIGKILL)
        await holder.wait()


async def until(watch: Watch, condition: Callable[[dict[str, bytes]], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition(watch.values):
            await watch.changed(0.05)


async def test_a_watch_knows_what_is_there_on_entry_and_what_comes(bus: Bus) -> None:
    """Values of before are known at once; changes and deletions arrive."""
    bucket = await bus.bucket("policy")
    await bucket.put("current", b"1")
    async with watched(bucket) as watch:
        assert watch.values == {"current": b"1"}
        await bucket.put("current", b"2")
        await bucket.put("other", b"x")
        await until(watch, lambda values: values == {"current": b"2", "other": b"x"})
        await bucket.delete("other")
        await until(watch, lambda values: values == {"current": b"2"})


async def test_leases_do_not_wait_for_the_disk(bus: Bus, run_name: str) -> None:
    """A thousand engines renew theirs more often than a disk syncs; what must survive a power cut is synced."""
    await bus.bucket("leases", ttl_s=TTL_S)
    await bus.bucket("policy")
    modes = [
        (await bus.jetstream.stream_info(f"KV_{run_name}_{name}")).config.persist_mode for name in ("leases", "policy")
    ]
    assert modes == [api.PersistMode.ASYNC, None]


async def test_an_idle_watch_of_one_key_costs_the_same_whatever_else_the_bucket_keeps(
    bus: Bus, bus_config: BusConfig, run_name: str
) -> None:
    """Every few seconds of silence a watch is opened anew; of a bucket full of history only the one key is read."""
    bucket = await bus.bucket("policy")
    for version in range(300):
        await bucket.put(f"version.{version}", b"x" * 100)
    await bucket.put("current", b"1")
    async with connect(bus_config, run=run_name) as other:
        opening = unittest.mock.patch.object(KeyValue, "watch", autospec=True, side_effect=KeyValue.watch)
        with opening as opened:
            async with watched(await other.bucket("policy"), keys="current") as watch:
                assert watch.values == {"current": b"1"}
                before = other.jetstream._nc.stats["in_msgs"]
                await waiting.until(lambda: opened.call_count >= 3)
                assert other.jetstream._nc.stats["in_msgs"] - before < 300
                await bucket.put("version.300", b"x")
                await bucket.put("current", b"2")
                await until(watch, lambda values: values == {"current": b"2"})


async def test_a_watch_goes_on_when_the_bucket_was_lost_and_made_again(bus: Bus) -> None:
    """The new bucket's revisions count from 1 again, which must not make its values look known."""
    bucket = await bus.bucket("policy")
    await bucket.put("current", b"old")
    async with watched(bucket, keys="current") as watch:
        await bus.jetstream.delete_key_value((await bucket.status()).bucket)
        await (await bus.bucket("policy")).put("current", b"new")
        await until(watch, lambda values: values == {"current": b"new"})


async def test_a_watch_of_an_empty_bucket_opens_at_once(bus: Bus) -> None:
    """Nothing there is an answer, too."""
    async with watched(await bus.bucket("replicas", ttl_s=TTL_S), ttl_s=TTL_S) as watch:
        assert watch.values == {}


async def test_a_watch_that_fails_to_open_leaves_no_subscription(bus: Bus) -> None:
    """It is opened again until it works, as often as the server is away; each attempt would listen on for ever."""
    bucket, num_before = await bus.bucket("policy"), len(bus.client._subs)
    ask, failures = JetStreamContext.PushSubscription.consumer_info, iter([nats.errors.TimeoutError()] * 2)

    async def ask_in_vain(subscription: JetStreamContext.PushSubscription) -> api.ConsumerInfo:
        if error := next(failures, None):
            raise error
        return await ask(subscription)

    with unittest.mock.patch.object(JetStreamContext.PushSubscription, "consumer_info", ask_in_vain):
        async with watched(bucket):
            assert next(failures, None) is None
            assert len(bus.client._subs) == num_before + 1
    assert len(bus.client._subs) == num_before


async def test_a_watch_that_is_cancelled_while_it_opens_leaves_no_subscription(bus: Bus) -> None:
    """Nor one that is cancelled while it ends."""
    bucket, num_before, asked = await bus.bucket("policy"), len(bus.client._subs), asyncio.Event()

    async def ask_for_ever(_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def watch() -> None:
        async with watched(bucket):
            raise AssertionError("no answer, and no watch")

    with unittest.mock.patch.object(JetStreamContext.PushSubscription, "consumer_info", ask_for_ever):
        opening = asyncio.create_task(watch())
        await asked.wait()
        opening.cancel()
        await asyncio.wait((opening,))
    assert len(bus.client._subs) == num_before


async def test_a_watch_whose_connection_is_gone_leaves_no_task(bus_config: BusConfig, run_name: str) -> None:
    """Nothing can be unsubscribed then, and nats-py keeps a subscription's tasks: one opens it again for ever."""
    before = asyncio.all_tasks()
    async with connect(bus_config, run=run_name) as bus:
        bucket = await bus.bucket("policy")
        connected = asyncio.all_tasks()
        async with watched(bucket):
            assert len(asyncio.all_tasks() - connected) > 1  # the watch's own, and those of nats-py
            await bus.client.close()
    assert asyncio.all_tasks() == before


async def test_all_who_wait_hear_of_a_change(bus: Bus) -> None:
    """Several may wait at once."""
    bucket = await bus.bucket("policy")
    async with watched(bucket) as watch:
        waiting = [asyncio.create_task(watch.changed(HANG_S)) for _ in range(5)]
        await asyncio.sleep(0)
        await bucket.put("current", b"1")
        assert await asyncio.gather(*waiting) == [True] * 5
        assert not await watch.changed(0.05)


async def test_a_change_while_nobody_waits_is_heard_of(bus: Bus) -> None:
    """By those who say how many changes they know; each change once."""
    bucket = await bus.bucket("policy")
    async with watched(bucket) as watch:
        known = watch.num_changes
        await bucket.put("current", b"1")
        await until(watch, lambda values: values == {"current": b"1"})
        assert await watch.changed(HANG_S, since=known)
        assert not await watch.changed(0.05, since=watch.num_changes)


async def test_a_held_lease_outlives_its_ttl(bus: Bus) -> None:
    """It is renewed three times in its ttl while held, each time with the value of now."""
    bucket, numbers = await bus.bucket("replicas", ttl_s=3.0), itertools.count()
    async with (
        watched(bucket, ttl_s=3.0) as watch,
        held(bucket, "r", lambda: str(next(numbers)).encode(), ttl_s=3.0),
    ):
        await until(watch, lambda values: "r" in values)
        await until(watch, lambda values: int(values["r"]) >= 4)


async def test_a_slow_server_does_not_make_renewals_rarer() -> None:
    """Each begins a third of the ttl after the last one began, or when that has been stored."""
    begun: list[float] = []

    class SlowBucket:
        async def put(self, key: str, value: bytes) -> None:
            begun.append(time.monotonic())
            await asyncio.sleep(0.25)

        async def delete(self, key: str) -> None:
            pass

    async with held(SlowBucket(), "r", lambda: b"", ttl_s=0.9):  # type: ignore[arg-type]
        await waiting.until(lambda: len(begun) >= 4)
    assert min(later - earlier for earlier, later in itertools.pairwise(begun)) < 0.5


async def test_a_lease_tells_a_change_at_once_and_ends_with_its_holder(bus: Bus) -> None:
    """Neither waits for a renewal or for the ttl, which come after minutes."""
    bucket, ttl_s, value = await bus.bucket("replicas", ttl_s=600.0), 600.0, b"1"
    async with watched(bucket, ttl_s=ttl_s) as watch:
        async with held(bucket, "r", lambda: value, ttl_s=ttl_s) as lease:
            await until(watch, lambda values: values == {"r": b"1"})
            value = b"2"
            await lease.renew()
            await until(watch, lambda values: values == {"r": b"2"})
        await until(watch, lambda values: values == {})


@pytest.mark.parametrize("others", [0, 1])
async def test_a_killed_holders_lease_ends_within_seconds(
    bus: Bus, bus_config: BusConfig, run_name: str, others: int
) -> None:
    """After kill -9 a lease goes by itself, whether or not others keep the bucket busy."""
    bucket = await bus.bucket("leases", ttl_s=TTL_S)
    async with contextlib.AsyncExitStack() as stack:
        for index in range(others):
            await stack.enter_async_context(held(bucket, f"other-{index}", lambda: b"x", ttl_s=TTL_S))
        watch = await stack.enter_async_context(watched(bucket, ttl_s=TTL_S))
        async with killed_at_the_end(bus_config.url, run_name):
            await until(watch, lambda values: "trainer" in values)
        await until(watch, lambda values: values.keys() == {f"other-{index}" for index in range(others)})


@pytest.mark.slow
async def test_leases_and_watches_survive_a_restart_of_the_server(tmp_path: Path, run_name: str) -> None:
    """On the same store and port: leases go on, values are kept, changes are seen; the end is in order without it."""
    ttl_s, numbers = 6.0, itertools.count()
    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(local_server(tmp_path))
        port = int(url.rsplit(":", 1)[1])
        async with connect(BusConfig(url=url), run=run_name) as bus:
            replicas, policy = await bus.bucket("replicas", ttl_s=ttl_s), await bus.bucket("policy")
            await policy.put("current", b"1")
            async with (
                held(replicas, "r", lambda: str(next(numbers)).encode(), ttl_s=ttl_s),
                watched(replicas, ttl_s=ttl_s) as replica_watch,
                watched(policy) as policy_watch,
            ):
                await until(replica_watch, lambda values: "r" in values)
                await first.aclose()
                async with local_server(tmp_path, port=port):
                    back_at = int(replica_watch.values["r"])
                    # Longer than the ttl: the lease is renewed, and that is seen.
                    await until(replica_watch, lambda values: int(values["r"]) >= back_at + 4)
                    assert policy_watch.values == {"current": b"1"}
                    await policy.put("current", b"2")
                    await until(policy_watch, lambda values: values == {"current": b"2"})


async def test_a_watch_is_complete_only_when_its_values_are_there(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py says that it is before, when the server has sent them and they have not arrived."""
    bucket = await bus.bucket("policy")
    for number in range(3):
        await bucket.put(f"version.{number}", b"x")
    num_asked, ask = 0, JetStreamContext.PushSubscription.consumer_info

    async def sent(subscription: JetStreamContext.PushSubscription) -> ConsumerInfo:
        nonlocal num_asked
        num_asked += 1
        info = await ask(subscription)
        assert info.delivered is not None
        num_sent = info.delivered.consumer_seq + (info.num_pending or 0)
        return dataclasses.replace(
            info, num_pending=0, delivered=dataclasses.replace(info.delivered, consumer_seq=num_sent)
        )

    monkeypatch.setattr(JetStreamContext.PushSubscription, "consumer_info", sent)
    monkeypatch.setattr(JetStreamContext.PushSubscription, "delivered", 0)
    async with watched(bucket, ttl_s=3.0) as watch:
        assert len(watch.values) == 3
        num_of_first = num_asked
        while num_asked < 2 * num_of_first:  # it is opened anew after half of its ttl
            assert not await watch.changed(0.05)
        assert not await watch.changed(0.2)
        assert len(watch.values) == 3


async def test_a_bucket_with_other_settings_is_a_setup_error(bus: Bus) -> None:
    """Processes whose [bus] sections differ are told so."""
    await bus.bucket("replicas", ttl_s=2.0)
    with pytest.raises(SetupError, match=r"other settings.*same \[bus\] section"):
        await bus.bucket("replicas", ttl_s=5.0)


async def test_a_change_in_the_moment_of_the_timeout_is_told(bus: Bus) -> None:
    """It would not be told again: whoever waits next waits for the next one."""
    loop, watch = asyncio.get_running_loop(), Watch(await bus.bucket("policy"))
    waiting = asyncio.create_task(watch.changed(0.05))
    await asyncio.sleep(0)
    loop.call_later(0.06, watch._announce)
    time.sleep(0.1)  # noqa: ASYNC251 - both come due in one step of the loop
    assert await waiting


async def test_a_watch_is_read_until_the_next_is_open(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals come later than it waits for them, and the server takes for ever to open another watch."""
    bucket = await bus.bucket("replicas", ttl_s=9.0)
    num_opened, open_watch = 0, KeyValue.watch

    async def hang(*args: object, **options: object) -> KeyValue.KeyWatcher:
        nonlocal num_opened
        num_opened += 1
        if num_opened > 1:
            await asyncio.Event().wait()
        return await open_watch(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyValue, "watch", hang)
    async with held(bucket, "r", lambda: b"x", ttl_s=4.5), watched(bucket, ttl_s=2.5) as watch:
        await waiting.until(lambda: num_opened == 2)
        ends_at = time.monotonic() + 4.0
        while time.monotonic() < ends_at:
            assert watch.values == {"r": b"x"}
            await watch.changed(0.1)


async def test_no_lease_lapses_while_nobody_can_renew_it(tmp_path: Path, run_name: str) -> None:
    """The server is frozen for longer than the ttl, as while a cluster elects a leader; after that, the dead vanish."""
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(local_server(tmp_path))
        pid = int((tmp_path / "nats.pid").read_text())
        bus, holder = [await stack.enter_async_context(connect(BusConfig(url=url), run=run_name)) for _ in range(2)]
        watch = await stack.enter_async_context(watched(await bus.bucket("leases", ttl_s=TTL_S), ttl_s=TTL_S))
        bucket = await holder.bucket("leases", ttl_s=TTL_S)
        await stack.enter_async_context(held(bucket, "living", lambda: b"x", ttl_s=TTL_S))
        async with killed_at_the_end(url, run_name) as holder:
            await until(watch, lambda values: values.keys() == {"living", "trainer"})
            with frozen(pid):
                holder.kill()
                ends_at = time.monotonic() + 3 * TTL_S
                while time.monotonic() < ends_at:
                    assert watch.values.keys() == {"living", "trainer"}
                    await asyncio.sleep(0.02)
        ends_at = time.monotonic() + HANG_S
        while "trainer" in watch.values:
            assert "living" in watch.values
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.02)
