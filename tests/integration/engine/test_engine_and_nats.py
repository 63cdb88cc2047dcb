"""An engine whose NATS is away once its model has loaded. SGLang is left out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from penstock.bus.connection import connect
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from services.rollout.engine import server
from tests.support.waiting import HANG_S, until


@contextlib.asynccontextmanager
async def nothing(*_: object, **__: object) -> AsyncIterator[None]:
    """In place of what needs SGLang."""
    yield


async def for_ever(*_: object, **__: object) -> None:
    """What runs beside a lease."""
    await asyncio.Event().wait()


def loaded() -> Any:
    """A server that serves."""

    async def end_service(_grace_s: float) -> None:
        return

    return SimpleNamespace(
        engine=SimpleNamespace(died=asyncio.Event(), until_it_hangs=for_ever),
        crashes=SimpleNamespace(is_useless=asyncio.Event(), require_useful=lambda: None),
        images=SimpleNamespace(attach=lambda _: None),
        view=SimpleNamespace(replica_id="engine-a"),
        changed=asyncio.Event(),
        end_service=end_service,
    )


@pytest.fixture
def engine_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an engine without SGLang."""
    monkeypatch.setattr(server, "_TRY_S", 2.0)
    monkeypatch.setattr(server, "_RETRY_S", 0.05)
    monkeypatch.setattr(server, "_measured", nothing)
    monkeypatch.setattr(server, "note_segments", lambda _: None)
    monkeypatch.setattr(server, "_lease", lambda _: b"lease")
    monkeypatch.setattr(server, "_follow_load", for_ever)
    (port,) = free_ports(1)
    return SimpleNamespace(
        bus=BusConfig(url=f"nats://127.0.0.1:{port}", lease_ttl_s=5.0),
        network=SimpleNamespace(host="127.0.0.1"),
        rollout=SimpleNamespace(port=0),
        run=SimpleNamespace(name="away", grace_s=1.0),
        metrics=SimpleNamespace(port=None),
        model=SimpleNamespace(path=Path("model")),
        float32_head=False,
        router_replay=False,
        group_timeout_s=1.0,
    )


def port_of(settings: Any) -> int:
    """Where its NATS listens."""
    return int(settings.bus.url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def waiting_engine(
    settings: Any, stop: asyncio.Event, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[None]]:
    """An engine that serves, whose NATS has left while its model loaded, and that has noticed it."""
    async with contextlib.AsyncExitStack() as nats, asyncio.timeout(HANG_S):
        await nats.enter_async_context(local_server(folder, port=port_of(settings)))

        @contextlib.asynccontextmanager
        async def running(*_: object, **__: object) -> AsyncIterator[Any]:
            await nats.aclose()
            yield loaded()

        monkeypatch.setattr(server, "running", running)
        with structlog.testing.capture_logs() as logs:
            serving = asyncio.create_task(server.serve(settings, stop, security=Security()))
            await until(lambda: serving.done() or any(each["event"] == "engine.bus_away" for each in logs))
            assert not serving.done()
            yield serving


async def test_a_loaded_engine_waits_for_nats(
    engine_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute's loading is not thrown away, and the run goes on: it holds its lease once NATS is there again."""
    stop = asyncio.Event()
    async with (
        waiting_engine(engine_settings, stop, tmp_path, monkeypatch) as serving,
        local_server(tmp_path, port=port_of(engine_settings)),
        connect(engine_settings.bus, run="away") as bus,
    ):
        bucket = await bus.bucket("replicas", ttl_s=5.0)
        await until(lambda: _holds(bucket))
        stop.set()
        await serving


async def test_an_engine_that_waits_for_nats_can_be_stopped(
    engine_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any other; NATS need not come back for that."""
    stop = asyncio.Event()
    async with waiting_engine(engine_settings, stop, tmp_path, monkeypatch) as serving:
        stop.set()
        await serving


async def _holds(bucket: Any) -> bool:
    return "engine-a" in await bucket.keys() if (await bucket.status()).values else False
