"""Environments behind a URL: the server that comes with Penstock, and servers that break the rules."""

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from penstock.config import SecurityConfig, loading
from penstock.errors import (
    AccessError,
    ConfigError,
    EnvironmentFailedError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from penstock.http.server import HttpServer
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from services.recipe import Recipe
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.server import serving_environments
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.certificates import security_of
from tests.support.strangers import TOKEN, assert_http_is_closed
from tests.support.waiting import HANG_S, until
from tests.support.worker.hosted_episodes import HERE, has_ended, make_task, pid_of, text_of, turn


@contextlib.asynccontextmanager
async def serving(
    kind: str = "Echo", *, security: Security | None = None, max_processes: int = 128, **options: Any
) -> AsyncIterator[HttpServer]:
    """The server of this project with the environment `kind`."""
    tables = WorkerConfig(environments={kind: f"{HERE}:{kind}"}).environments
    async with (
        EnvironmentRegistry(tables, max_processes=max_processes) as registry,
        serving_environments(registry, [kind], security=security or Security(), **options) as server,
    ):
        yield server


@contextlib.asynccontextmanager
async def player_of(url: str, name: str, *, security: Security | None = None) -> AsyncIterator[Callable[[], Any]]:
    """A worker's factory of environments that play at `url` under `name`."""
    tables = WorkerConfig(environments={"mine": {"url": url, "name": name}}).environments
    async with EnvironmentRegistry(tables, security=security) as registry:
        yield registry.find("mine")


@contextlib.asynccontextmanager
async def episode_of(url: str, name: str, **options: Any) -> AsyncIterator[Any]:
    """One episode's environment, closed at the end."""
    async with player_of(url, name, **options) as factory:
        environment = factory()
        try:
            yield environment
        finally:
            await environment.close()


async def test_an_episode_is_played_at_a_server() -> None:
    """Task, images, turns, rewards and the time left travel; the process there ends with the episode."""
    task = make_task(remaining_s=60.0)
    async with serving() as server:
        async with episode_of(server.url, "Echo") as environment:
            first = await environment.reset(task)
            assert first.images == task.images
            assert "{'level': [1, None]}" in text_of(first)
            assert text_of(await environment.step(turn("one"))) == "one []"
            assert 50 < float(text_of(await environment.step(turn("time")))) <= 60
            last = await environment.step(turn("stop"))
            assert (last.observation, last.reward, last.metrics) == (None, 3.0, {"heard": 3.0})
        await until(lambda: has_ended(pid_of(first)))


@pytest.mark.parametrize("kind", ["Echo", "AsyncEcho"])
async def test_a_remote_environment_asks_its_worker_for_verdicts(kind: str) -> None:
    """It needs no address of the reward service; a failure to judge is an error there."""
    prefix = "grade " if kind == "Echo" else ""
    async with serving(kind) as server, episode_of(server.url, kind) as environment:
        await environment.reset(make_task())
        assert text_of(await environment.step(turn(f"{prefix}3"))) == "OK 1.0"
        assert text_of(await environment.step(turn(f"{prefix}4"))) == "OK 0.0"
        with pytest.raises(EnvironmentFailedError, match="no reward service answers"):
            await environment.step(turn(f"{prefix}fail"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Raises", "step raised KeyError: 'board'"),
        ("Segfaults", "was ended by SIGSEGV during step"),
        ("HugePicture", "images of an observation have 209715200 bytes"),
    ],
)
async def test_what_fails_at_the_server_is_told_to_the_worker(kind: str, reason: str) -> None:
    """As if it ran here."""
    async with serving(kind) as server, episode_of(server.url, kind) as environment:
        await environment.reset(make_task())
        with pytest.raises(EnvironmentFailedError, match=reason) as failed:
            await environment.step(turn("go"))
        assert isinstance(failed.value, messages.ObservationTooLargeError) == (kind == "HugePicture")


async def num_failed_calls() -> int:
    """Calls of environments that have failed, on the page for Prometheus."""
    found = re.search(
        r'^penstock_environment_calls_total\{outcome="failed"\} (\d+)', (await metrics.page()).decode(), re.MULTILINE
    )
    return int(found[1]) if found else 0


async def test_an_answer_that_cannot_be_sent_is_a_failed_call() -> None:
    """For the worker, and for Prometheus."""
    failed_before = await num_failed_calls()
    async with serving("SaysHalfAnEmoji") as server, episode_of(server.url, "SaysHalfAnEmoji") as environment:
        await environment.reset(make_task())
        with pytest.raises(EnvironmentFailedError, match=r"a message cannot be sent: .*surrogates not allowed"):
            await environment.step(turn("go"))
    assert await num_failed_calls() == failed_before + 1


async def test_an_episode_that_its_worker_gives_up_ends_at_the_server() -> None:
    """The stuck process is killed there."""
    async with serving("StuckInStep") as server:
        async with episode_of(server.url, "StuckInStep") as environment:
            pid = pid_of(await environment.reset(make_task()))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await environment.step(turn("go"))
        await until(lambda: has_ended(pid))


async def test_the_server_keeps_the_deadline_that_it_is_told() -> None:
    """Also for a client that does not: it answers 504, and the episode has ended."""
    task = make_task()
    async with serving("Sleeps") as server, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        reset = messages.ResetRequest(
            number=0, remaining_s=60.0, environment="Sleeps", task=messages.TaskMessage.of(task)
        )
        first = await http.post("/v1/episodes/mine", content=messages.encode(reset))
        assert first.json()["kind"] == "observation"
        step = messages.encode(messages.to_step(turn("go"), number=1, remaining_s=0.3))
        assert (await http.post("/v1/episodes/mine", content=step)).status_code == 504
        gone = await http.post("/v1/episodes/mine", content=step)
        assert gone.status_code == 404
        assert "there is no such episode" in gone.json()["error"]["message"]


async def test_an_episode_whose_worker_vanished_expires() -> None:
    """Nobody deletes it."""
    async with serving(max_idle_s=0.2) as server, player_of(server.url, "Echo") as factory:
        environment = factory()
        pid = pid_of(await environment.reset(make_task()))
        await until(lambda: has_ended(pid))
        with pytest.raises(EnvironmentFailedError, match=r"404: .*ended or expired, or the server was restarted"):
            await environment.step(turn("one"))


async def test_a_full_server_says_so() -> None:
    """Whoever begins episodes waits then; the second one begins when the first has ended."""
    async with serving(max_episodes=1) as server, player_of(server.url, "Echo") as factory:
        first, second, third = factory(), factory(), factory()
        await first.reset(make_task())
        with pytest.raises(OverloadedError, match="has no room: it answered 429"):
            await third.reset(make_task())
        await first.close()
        assert "hello" in text_of(await second.reset(make_task()))
        await second.close()


async def test_a_server_without_a_free_process_says_so() -> None:
    """Processes are bounded apart from episodes, which may need none; an episode that ended leaves its room."""
    async with serving(max_processes=1) as server, player_of(server.url, "Echo") as factory:
        first, second, third = factory(), factory(), factory()
        await first.reset(make_task())
        with pytest.raises(OverloadedError, match=r"429: .*all 1 processes of environments are taken"):
            await third.reset(make_task())
        await first.close()
        assert "hello" in text_of(await second.reset(make_task()))
        await second.close()


async def test_a_worker_waits_for_a_server_that_comes_later() -> None:
    """A refused connection began no episode, so it is tried again while the episode has time."""
    port = free_ports(1)[0]
    async with player_of(f"http://127.0.0.1:{port}", "Echo") as factory:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await factory().reset(make_task(remaining_s=0.1))
        environment = factory()
        waiting = asyncio.create_task(environment.reset(make_task()))
        async with serving(port=port):
            assert "hello" in text_of(await waiting)
            await environment.close()


async def test_only_what_is_named_is_served() -> None:
    """No other delivery of the prompt would find it there either."""
    async with serving() as server, episode_of(server.url, "single_turn") as environment:
        with pytest.raises(InvalidRequestError, match="environment 'single_turn' is not served here; served: Echo"):
            await environment.reset(make_task())


async def test_an_unknown_environment_cannot_be_served() -> None:
    """The server does not start, and says what there is."""
    async with EnvironmentRegistry() as registry:
        with pytest.raises(ConfigError, match="names has maze, which is unknown; known: calculator, "):
            await serving_environments(registry, ["maze"], security=Security()).__aenter__()


async def test_token_and_tls(certificates: SecurityConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker shows PENSTOCK_ENVIRONMENT_TOKEN, never PENSTOCK_TOKEN, and takes the authority of [security]."""
    secured = security_of(certificates, token=TOKEN)
    async with serving(host="localhost", security=secured) as server:
        async with episode_of(server.url, "Echo", security=secured) as environment:
            with pytest.raises(AccessError, match="set PENSTOCK_ENVIRONMENT_TOKEN to its token"):
                await environment.reset(make_task())
        monkeypatch.setenv("PENSTOCK_ENVIRONMENT_TOKEN", TOKEN)
        async with episode_of(server.url, "Echo", security=secured) as environment:
            assert "hello" in text_of(await environment.reset(make_task()))
        async with episode_of(server.url, "Echo") as environment:
            with pytest.raises(UnavailableError, match="certificate"):
                await environment.reset(make_task(remaining_s=0.1))
        assert secured.tls is not None
        async with httpx.AsyncClient(base_url=server.url, verify=secured.tls.client_context(), timeout=HANG_S) as http:
            await assert_http_is_closed(http, "/v1/episodes/x")


def _reply(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


_FIRST = _reply(
    kind="observation",
    number=0,
    observation={"messages": [{"role": "user", "parts": [{"type": "text", "text": "hello"}]}]},
)
_END = {"kind": "result", "observation": None}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"<html>", "it answered what is no message .*<html>"),
        (_reply(**_END, number=1) * 2, "it answered what is no message"),
        (_reply(**_END, number=0), "it answered request 0 where 1 was asked"),
        (_FIRST.replace(b'"number": 0', b'"number": 1'), "it answered step with 'observation', not with 'result'"),
        (_reply(**_END, number=1, rewards=1.0), "unknown field `rewards`"),
        (_reply(**_END, number=1, reward=math.nan), "it answered what is no message"),
        (_reply(**_END, number=1, reward="1"), "Expected `float | null`, got `str`"),
        (_reply(**_END, number=1, metrics={str(i): 0 for i in range(300)}), "300 metrics; at most 256"),
        (_reply(kind="failed", number=1, error="no board"), "^no board$"),
        (b" " * (messages.MAX_MESSAGE_BYTES + 1), "with more than 50331648 bytes"),
        (None, "broke off during step"),
    ],
)
async def test_a_server_that_breaks_the_rules_ends_the_episode(answer: bytes | None, reason: str) -> None:
    """Garbage, two answers, an old one, a wrong one, too much, or none: the reason says which."""
    async with _answering([_FIRST, answer]) as url, episode_of(url, "any") as environment:
        await environment.reset(make_task())
        with pytest.raises(EnvironmentFailedError, match=reason):
            await environment.step(turn("go"))


async def test_a_server_that_does_not_answer_is_left_at_the_deadline() -> None:
    """Calls have no limit but the episode's, which ends them, and the end itself does not wait for the server."""
    async with _answering([_FIRST]) as url, episode_of(url, "any") as environment:
        await environment.reset(make_task())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await environment.step(turn("go"))


@contextlib.asynccontextmanager
async def _answering(answers: list[bytes | None]) -> AsyncIterator[str]:
    """An HTTP server that answers request n with `answers[n]`; None breaks off, and further ones get no answer."""
    left = iter(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
                await reader.readexactly(int(sizes[0]) if sizes else 0)
                body = b"{}" if head.startswith(b"DELETE") else next(left, b"")
                if body is None:
                    break
                if body:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"url": "ftp://host:1"}, "url must be http://host:port or https://host:port"),
        ({"url": "http://user:secret@host:1"}, "url must be http://host:port"),
        ({"url": "http://host:1", "class": "a:B", "isolated": True}, "class and isolated cannot stand beside url"),
        ({"url": "http://host:1", "args": {"a": 1}}, "args cannot stand beside url"),
        ({"name": "theirs"}, "needs its url"),
        ({"clas": "a:B"}, "unknown key worker.environments.mine.clas; did you mean worker.environments.mine.class?"),
        (3, "worker.environments.mine"),
    ],
)
def test_a_wrong_table_is_a_mistake_in_the_recipe(table: Any, reason: str) -> None:
    """The message names the environment, and never shows a secret."""
    override = f"--worker.environments.mine={_toml(table)}"
    with pytest.raises(ConfigError, match=reason) as raised:
        loading.load(Recipe, [], [override])
    assert "worker.environments.mine" in str(raised.value)
    assert "secret" not in str(raised.value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
