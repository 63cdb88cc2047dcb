"""Who is let in to NATS: a real nats-server of our own, with a token and with TLS."""

import asyncio
import contextlib
import gc
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import structlog

from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.bus.work_queue.work_loop import work
from penstock.config import BusConfig, SecurityConfig
from penstock.errors import AccessError, ConfigError, SetupError
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from tests.support.certificates import security_of
from tests.support.strangers import TOKEN, WRONG
from tests.support.waiting import HANG_S, promptly, until


async def enter(url: str, security: Security, *, timeout_s: float = HANG_S) -> None:
    """Connect and use JetStream."""
    async with connect(BusConfig(url=url), run="r", security=security, timeout_s=timeout_s) as bus:
        await bus.ensure_streams()


async def turned_away(url: str, security: Security, has_failed: Callable[[], object]) -> str:
    """The error of somebody who is not let in, and whose time is over as soon as an attempt has failed."""
    loop = asyncio.get_running_loop()
    now = loop.time
    entering = asyncio.create_task(enter(url, security))
    await until(has_failed)
    with patch.object(loop, "time", lambda: now() + HANG_S), pytest.raises(SetupError) as caught:
        await entering
    return str(caught.value)


async def test_nats_needs_the_token(tmp_path: Path) -> None:
    """Who has none or another hears so at once, and what to set; no file of the server's holds it."""
    async with local_server(tmp_path, security=security_of(nats_token=TOKEN)) as url:
        for stranger in (Security(), security_of(nats_token=WRONG), security_of(token=TOKEN, nats_token=WRONG)):
            with pytest.raises(AccessError, match="token missing or wrong; set PENSTOCK_NATS_TOKEN") as caught:
                await enter(url, stranger, timeout_s=60.0)
            assert TOKEN[:-1] not in str(caught.value)
        await enter(url, security_of(nats_token=TOKEN))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "nats.conf" in files
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


# nats-py forgets those that are refused
@pytest.mark.filterwarnings("ignore:unclosed (<StreamWriter|transport|<socket):ResourceWarning")
async def test_who_was_in_waits_for_a_server_that_refuses(tmp_path: Path) -> None:
    """One that comes back with another token is an accident that somebody mends; the run goes on then."""
    security = security_of(nats_token=TOKEN)
    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(local_server(tmp_path, security=security))
        port = int(url.rpartition(":")[2])
        async with connect(BusConfig(url=url), run="r", security=security) as bus:
            await bus.ensure_streams()
            await first.aclose()
            with structlog.testing.capture_logs() as logs:
                async with local_server(tmp_path, port=port, security=security_of(nats_token=WRONG)):
                    await until(lambda: "bus.refused" in {line["event"] for line in logs})
            async with local_server(tmp_path, port=port, security=security):
                await promptly(bus.publish(bus.prompts, b"prompt", message_id="a"))
    gc.collect()


@pytest.mark.parametrize("token", ["3k", "true", "1234e5", "0x1f", "-1", "a//b"])
async def test_a_token_that_looks_like_something_else_to_nats_is_taken_as_it_is(tmp_path: Path, token: str) -> None:
    """Its configuration would read a number, a truth or a comment out of it."""
    async with local_server(tmp_path, security=security_of(nats_token=token)) as url:
        await enter(url, security_of(nats_token=token))
        with pytest.raises(AccessError):
            await enter(url, security_of(nats_token=f"{token}0"))


async def test_by_default_the_server_has_the_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `penstock train` and `penstock serve nats` start it; PENSTOCK_TOKEN alone closes NATS as well."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    async with local_server(tmp_path) as url:
        async with connect(BusConfig(url=url), run="r") as bus:
            await bus.ensure_streams()
        with pytest.raises(AccessError):
            await enter(url, Security())


async def test_tls(tmp_path: Path, certificates: SecurityConfig, other_certificates: SecurityConfig) -> None:
    """Who knows the authority is let in; plain text and another authority are not, and hear why."""
    nameless = certificates.model_copy(update={"tls_cert": None, "tls_key": None})
    async with local_server(tmp_path, security=security_of(certificates, nats_token=TOKEN)) as url:
        await enter(url, security_of(nameless, nats_token=TOKEN))
        for stranger in (Security(nats_token=TOKEN), security_of(other_certificates, nats_token=TOKEN)):
            with structlog.testing.capture_logs() as logs:
                error = await turned_away(url, stranger, lambda logs=logs: "certificate verify failed" in str(logs))
            assert "certificate verify failed" in error
        with pytest.raises(AccessError):
            await enter(url, security_of(nameless, nats_token=WRONG))


async def test_one_name_may_stand_for_every_host(tmp_path: Path, certificates: SecurityConfig) -> None:
    """As for containers, whose names no certificate can know; a certificate without it is none."""
    async with local_server(tmp_path, security=security_of(certificates)) as url:
        await enter(url, security_of(certificates.model_copy(update={"tls_server_name": "penstock"})))
        another = security_of(certificates.model_copy(update={"tls_server_name": "another"}))
        with structlog.testing.capture_logs() as logs:
            error = await turned_away(url, another, lambda: "certificate verify failed" in str(logs))
        assert "certificate verify failed" in error


async def test_mutual_tls(tmp_path: Path, certificates: SecurityConfig) -> None:
    """Callers need a certificate of the same authority."""
    mutual = certificates.model_copy(update={"mutual": True})
    async with local_server(tmp_path, security=security_of(mutual)) as url:
        await enter(url, security_of(mutual))
        with pytest.raises(SetupError):
            await enter(
                url, security_of(certificates.model_copy(update={"tls_cert": None, "tls_key": None})), timeout_s=2.0
            )


async def test_a_server_without_a_certificate_does_not_start(tmp_path: Path, certificates: SecurityConfig) -> None:
    """Rather than in plain text, where the recipe asks for TLS."""
    security = security_of(certificates.model_copy(update={"tls_cert": None, "tls_key": None}))
    with pytest.raises(ConfigError, match=r"security\.tls_cert is not set"):
        async with local_server(tmp_path, security=security):
            pass


async def test_a_token_is_not_shown_to_a_server_without_tls(certificates: SecurityConfig) -> None:
    """Somebody in the middle who says that there is none hears no CONNECT."""
    heard = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {
            "server_id": "x",
            "version": "2.11.0",
            "max_payload": 1000,
            "auth_required": True,
            "tls_required": False,
        }
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        heard.extend(await reader.read(10_000))
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reason = "the server speaks plain text, and [security] asks for TLS"
        with structlog.testing.capture_logs() as logs:
            asking = security_of(certificates, nats_token=TOKEN)
            assert reason in await turned_away(url, asking, lambda: reason in str(logs))
        assert heard == b""
        # The pretender would have heard it.
        await turned_away(url, security_of(nats_token=TOKEN), lambda: TOKEN.encode() in heard)


@pytest.mark.parametrize(
    ("host", "variables", "is_open"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"PENSTOCK_TOKEN": TOKEN}, False),
        ("0.0.0.0", {"PENSTOCK_NATS_TOKEN": TOKEN}, False),
    ],
)
async def test_a_server_that_is_left_open_says_so(
    tmp_path: Path, host: str, variables: dict[str, str], is_open: bool
) -> None:
    """`penstock serve nats` on all addresses without a token, and only that."""
    (port,) = free_ports(1)
    options = (f"--bus.url=nats://{host}:{port}", f"--run.dir={tmp_path}", "--log.format=json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "serve", "nats", *options),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    assert process.stderr is not None
    warnings = []
    async with asyncio.timeout(HANG_S):
        while b"Server is ready" not in (line := await process.stderr.readline()):
            assert line, "it did not start"
            warnings += [json.loads(line)] if b"server.left_open" in line else []
        process.terminate()
        await process.communicate()
    assert [warning["address"] for warning in warnings] == [f"nats://{host}:{port}"] * is_open
    assert all("set PENSTOCK_NATS_TOKEN" in warning["remedy"] for warning in warnings)


async def test_a_handler_that_is_let_in_nowhere_ends_the_work_and_keeps_the_message(bus: Bus) -> None:
    """A worker with a wrong token uses up no prompt: it ends, and another plays them."""
    await bus.publish(bus.prompts, b"prompt", message_id=uuid.uuid4().hex)
    options = {"stop": asyncio.Event(), "concurrency": 4, "max_deliveries": 1}

    async def refused(_: Delivery) -> None:
        raise AccessError("router at x: token missing or wrong; set PENSTOCK_TOKEN")

    async with consuming(bus, bus.prompts, "workers", ack_wait_s=1.0, max_ack_pending=10) as consumer:
        with structlog.testing.capture_logs() as logs, pytest.raises(AccessError, match="router at x"):
            await promptly(work(consumer, refused, **options))
        assert "message.buried" not in {line["event"] for line in logs}
        [delivery] = await consumer.fetch(1) or await consumer.fetch(1) or await consumer.fetch(1)
        assert delivery.payload == b"prompt"
        await delivery.ack()
