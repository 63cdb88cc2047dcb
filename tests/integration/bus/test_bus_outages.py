"""The bus when its server goes away, comes back without its store, or cannot be set up."""

import asyncio
import contextlib
import os
import shutil
import signal
import unittest.mock
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest
from nats.js import api
from structlog.testing import capture_logs

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.watch import watched
from penstock.bus.connection import Bus, connect
from penstock.bus.late_answers import awaited
from penstock.bus.local_server import local_server
from penstock.bus.work_queue.pull import PullRequests
from penstock.config import BusConfig
from penstock.errors import AccessError, SetupError, UnavailableError
from penstock.runtime.security import Security
from penstock.testing.freezing import frozen
from penstock.testing.local_cluster import local_cluster
from tests.support.bus.work_queue import OpenConsumer, fetch_one, num_messages
from tests.support.waiting import HANG_S, promptly, until


async def test_a_publish_waits_out_a_restart_of_the_server(
    workers: OpenConsumer, tmp_path: Path, run_name: str
) -> None:
    """While the server is away a publish waits; afterwards it is stored once, and what was stored before is there."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path))
        port = int(url.rsplit(":", 1)[1])
        async with connect(BusConfig(url=url), run=run_name) as bus:
            await bus.ensure_streams()
            await bus.publish(bus.prompts, b"before", message_id="before")
            consumer = await workers(bus)
            await server.aclose()
            with capture_logs() as events:
                pending = asyncio.create_task(bus.publish(bus.prompts, b"during", message_id="during"))
                await until(lambda: "bus.store_retried" in [event["event"] for event in events])
            assert not pending.done()
            async with local_server(tmp_path, port=port):
                await promptly(pending)
                assert await num_messages(bus, bus.prompts.name) == 2
                assert not (await bus.publish(bus.prompts, b"before", message_id="before")).is_new
                assert {(await fetch_one(consumer)).payload for _ in range(2)} == {b"before", b"during"}


@pytest.mark.parametrize("waiting", ["publish", "put", "fetch"])
async def test_a_server_that_comes_back_without_its_store_is_an_error(
    workers: OpenConsumer, tmp_path: Path, run_name: str, waiting: str
) -> None:
    """Whoever waits for the stream, the bucket or the consumer hears that it is gone, where, and what to do."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path / "first"))
        port = int(url.rsplit(":", 1)[1])
        async with connect(BusConfig(url=url), run=run_name) as bus:
            await bus.ensure_streams()
            bucket, consumer = await bus.bucket("policy"), await workers(bus)

            async def fetch_forever() -> None:
                while True:
                    await consumer.fetch(1)

            await server.aclose()
            attempt, what = {
                "publish": (lambda: bus.publish(bus.prompts, b"x", message_id="x"), f"stream {run_name}_PROMPTS"),
                "put": (lambda: bus.put(bucket, "current", b"1"), "the bucket for the write of current"),
                "fetch": (fetch_forever, f"consumer workers of stream {run_name}_PROMPTS"),
            }[waiting]
            pending = asyncio.ensure_future(attempt())
            async with local_server(tmp_path / "second", port=port):
                with pytest.raises(
                    SetupError, match=rf"{what} is gone from NATS at {url}: .*start the processes of the run again"
                ):
                    await promptly(pending)


def reload_token(folder: Path, token: str) -> None:
    """Have the server in `folder` require another token from now on, as `nats-server --signal reload` does."""
    config = folder / "nats.conf"
    kept, _, _ = config.read_text().partition("authorization")
    config.write_text(f'{kept}authorization {{ token: "{token}" }}\n')
    os.kill(int((folder / "nats.pid").read_text()), signal.SIGHUP)


@pytest.mark.parametrize("waiting", ["fetch", "watch", "lease"])
async def test_a_connection_that_the_server_closes_for_good_is_an_error(
    workers: OpenConsumer, tmp_path: Path, run_name: str, waiting: str
) -> None:
    """Nothing opens it again: whoever waits ends, and its process, started again, hears that the token is wrong."""
    security = Security(nats_token="before")

    async def use(url: str, is_used: asyncio.Event) -> None:
        async with connect(BusConfig(url=url), run=run_name, security=security) as bus:
            await bus.ensure_streams()
            bucket = await bus.bucket("replicas", ttl_s=30.0)
            if waiting == "fetch":
                consumer = await workers(bus)
                is_used.set()
                while True:
                    await consumer.fetch(1)
            elif waiting == "watch":
                async with watched(bucket, ttl_s=30.0) as watch:
                    is_used.set()
                    while True:
                        await watch.changed(1.0)
            else:
                async with held(bucket, "engine", lambda: b"", ttl_s=30.0):
                    is_used.set()
                    await asyncio.Event().wait()

    async with local_server(tmp_path, security=security) as url:
        is_used = asyncio.Event()
        using = asyncio.create_task(use(url, is_used))
        await promptly(is_used.wait())
        reload_token(tmp_path, "after")
        with pytest.raises(
            UnavailableError, match=rf"NATS at {url} has closed the connection for good .*authorization"
        ):
            await promptly(using)
        with pytest.raises(AccessError, match="token missing or wrong"):
            async with connect(BusConfig(url=url), run=run_name, security=security):
                raise AssertionError


async def test_a_restarted_server_is_given_time_to_be_ready(bus: Bus) -> None:
    """Answers of "nobody here" are borne for a while; a server without JetStream for longer is an error."""
    answers = iter([nats.js.errors.ServiceUnavailableError(), nats.js.errors.NotFoundError(), None])

    async def look() -> None:
        if error := next(answers, nats.js.errors.ServiceUnavailableError()):
            raise error

    presence = bus.presence("stream s", look)
    for _ in range(4):
        await presence.check()
    with unittest.mock.patch("penstock.bus.failures._NOT_READY_S", 0.0), pytest.raises(SetupError, match="JetStream"):
        await presence.check()


async def test_a_cluster_without_a_leader_is_waited_for(bus: Bus) -> None:
    """However long it takes to elect one, or to start the servers that are away."""
    without_leader = nats.js.errors.ServiceUnavailableError(code=503, err_code=10008, description="no leader")

    async def look() -> None:
        raise without_leader

    presence = bus.presence("stream s", look)
    with unittest.mock.patch("penstock.bus.failures._NOT_READY_S", 0.0):
        for _ in range(3):
            await presence.check()


async def test_a_request_that_was_lost_with_its_server_is_given_up_within_seconds(bus: Bus) -> None:
    """Of a cluster, the one that had the consumer; half a minute would pass if a large message were on its way."""

    async def ignore(_: object) -> None:
        pass

    listening = await bus.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.s.d", cb=ignore)
    pull = PullRequests(bus.client, stream="s", durable="d")
    await pull.open()
    async with asyncio.timeout(15.0):
        assert await pull.request(1, wait_s=0.1) == ([], "503")
    await pull.close()
    await listening.unsubscribe()


async def test_a_late_answer_is_awaited_no_longer_than_it_can_come(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has nothing more for this process, so that the answer was lost: with another server, for example."""

    async def ignore(_: object) -> None:
        pass

    monkeypatch.setattr("penstock.bus.late_answers._ANSWER_S", 0.1)
    listening = await bus.client.subscribe("question", cb=ignore)
    with pytest.raises(nats.errors.TimeoutError):
        await promptly(awaited(bus.client, bus.client.request("question", timeout=2 * HANG_S)))
    await listening.unsubscribe()


async def test_what_cannot_be_set_up_is_one_line(workers: OpenConsumer, tmp_path: Path, run_name: str) -> None:
    """A server that stops answering, or has no room: SetupError at each of the first things that a process does."""
    async with local_server(tmp_path) as url, connect(BusConfig(url=url), run=run_name) as bus:
        await bus.ensure_streams()
        pid = int((tmp_path / "nats.pid").read_text())
        full = nats.js.errors.ServerError(code=500, description="insufficient storage resources available")
        with unittest.mock.patch.object(bus.jetstream, "add_stream", side_effect=full):
            with pytest.raises(SetupError, match=rf"NATS at {url}: stream .* \(insufficient storage .*has room"):
                await bus.ensure_streams()
            with pytest.raises(SetupError, match=rf"NATS at {url}: bucket {run_name}_policy .* \(insufficient storage"):
                await bus.bucket("policy")
        with (
            frozen(pid),
            unittest.mock.patch.object(bus.jetstream, "_timeout", 0.2),
            unittest.mock.patch("penstock.bus.answers.ANSWER_S", 0.0),
        ):
            for setting_up in (bus.ensure_streams, lambda: bus.bucket("policy"), lambda: workers(bus)):
                with pytest.raises(SetupError, match=rf"NATS at {url}: .* could not be set up \(nats: timeout\)"):
                    await setting_up()


async def test_a_server_without_jetstream_is_one_line(tmp_path: Path, run_name: str) -> None:
    """Nothing is waited for, because time adds no JetStream; the remedy is the server's configuration."""
    with local_cluster(tmp_path, size=1, without_jetstream=1) as local:
        refused = pytest.raises(
            SetupError, match=f"^bus.url = '{local.url}': the server there offers no JetStream; .* jetstream block"
        )
        with refused:
            async with connect(BusConfig(url=local.url), run=run_name):
                raise AssertionError


async def test_a_frozen_server_delays_what_is_set_up(tmp_path: Path, run_name: str) -> None:
    """Streams and a bucket wait until it goes on, however often NATS' own time for an answer has passed."""
    async with local_server(tmp_path) as url, connect(BusConfig(url=url), run=run_name) as bus:
        pid = int((tmp_path / "nats.pid").read_text())
        for setting_up in (bus.ensure_streams(), bus.bucket("policy")):
            with frozen(pid), capture_logs() as events, unittest.mock.patch.object(bus.jetstream, "_timeout", 0.1):
                pending = asyncio.ensure_future(setting_up)
                await until(lambda: [event["event"] for event in events].count("bus.no_answer") >= 2)
            await promptly(pending)


async def test_a_consumer_whose_file_was_in_use_is_made_again(
    workers: OpenConsumer, tmp_path: Path, run_name: str
) -> None:
    """As at a busy server that still writes the state of a removed consumer of the same name: it fails once."""
    async with local_server(tmp_path) as url, connect(BusConfig(url=url), run=run_name) as bus:
        await bus.ensure_streams()
        (folder,) = tmp_path.glob(f"**/streams/{bus.prompts.name}")
        (folder / "obs/workers/o.dat.tmp").mkdir(parents=True)
        with capture_logs() as events:
            await workers(bus)
        assert [event["event"] for event in events].count("bus.not_set_up") == 1


async def test_bounds_of_streams_need_no_room(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """By default NATS refuses bounds above three quarters of the free disk, however little is stored."""
    bound = min(shutil.disk_usage(tmp_path).free, 9 * 2**40 // 10)
    await bus.ensure_stream(api.StreamConfig(name=bus.calls.name, subjects=[run_name], max_bytes=bound))


@pytest.mark.parametrize("path", ["deploy/nats.conf", "deploy/docker/nats.conf", "penstock/bus/local_server.py"])
def test_every_server_keeps_what_it_acknowledged_and_bears_several_large_groups(path: str) -> None:
    """With NATS' defaults a power cut loses two minutes, and a client is cut off that has 64 MB outstanding, or takes
    10 s for what was sent."""
    text = (Path(__file__).parents[3] / path).read_text()
    settings = ("max_payload: 32MB", "max_pending: 512MB", 'write_deadline: "60s"', "sync_interval: always")
    assert all(setting in text for setting in (*settings, "max_file_store: 1TB"))


async def test_no_server_is_one_line_that_says_what_to_do() -> None:
    """SetupError names bus.url, its value and the remedy."""
    with pytest.raises(SetupError, match=r"bus.url = 'nats://127.0.0.1:9'.*penstock serve nats"):
        async with connect(BusConfig(url="nats://127.0.0.1:9"), run="r", timeout_s=0.5):
            pass
    with pytest.raises(SetupError, match=r"bus.url is empty.*--bus.url="):
        async with connect(BusConfig(), run="r"):
            pass
