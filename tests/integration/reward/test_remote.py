"""The profile `remote`: another service verifies, over real HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pytest

from penstock.v1 import reward_pb2
from penstock.verdict_status import Status
from services.reward.config import RemoteConfig
from services.reward.item import Item
from services.reward.remote import RemoteVerifier
from tests.support.reward.service import OK, TIMEOUT, reward_service
from tests.support.waiting import promptly, until

_FAILED = reward_pb2.VERDICT_STATUS_FAILED


@dataclass
class RewardModel:
    """A small HTTP server that stands for somebody's reward model."""

    reply: Callable[[dict[str, Any]], tuple[int, str]]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    max_at_once: int = 0
    hangs: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive."""
        self.num_connections += 1
        self.num_open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
                )
                request = json.loads(await reader.readexactly(size))
                self.requests.append(request)
                self.max_at_once = max(self.max_at_once, self.num_open)
                if self.hangs:
                    await reader.read()  # until the client leaves
                    return
                await asyncio.sleep(0.01)  # other requests come meanwhile, if they are allowed to
                status, text = self.reply(request)
                body = text.encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
                await writer.drain()
        except (EOFError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def reward_model(reply: Callable[[dict[str, Any]], tuple[int, str]]) -> AsyncIterator[RewardModel]:
    """A reward model that answers each request with a status and a text."""
    model = RewardModel(reply)
    server = await asyncio.start_server(model.serve, "127.0.0.1", 0)
    async with server:
        model.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
        yield model
        server.close()


def _item(response: str, *golds: str, deadline_s: float = 0.0) -> reward_pb2.VerifyItem:
    return reward_pb2.VerifyItem(
        golds=golds or ("5",), response=response, prompt="How many?", profile="remote", deadline_s=deadline_s
    )


async def test_asks_as_slime_does_and_takes_the_number() -> None:
    """The request is slime's; a bare number, `score` or `reward` is the score, of any size; connections are kept."""
    replies = {"bare": "-1.5", "score": '{"score": 0.25, "x": 1}', "reward": '{"reward": 3}', "many": "1"}
    async with reward_model(lambda request: (200, replies[request["response"]])) as model:
        async with reward_service(remote={"url": model.url, "max_concurrency": 2}) as (client, _):
            assert "remote" in [profile.name for profile in await client.list_profiles()]
            items = [_item("bare"), _item("score"), _item("reward"), _item("many", "5", "6")]
            verdicts = await client.verify_batch(items * 5, timeout_s=600.0)
        await until(lambda: model.num_open == 0)
    assert [verdict.score for verdict in verdicts[:4]] == [-1.5, 0.25, 3.0, 1.0]
    assert {verdict.status for verdict in verdicts} == {OK}
    assert {verdict.method for verdict in verdicts} == {reward_pb2.VERDICT_METHOD_VERIFIER}
    assert {"prompt": "How many?", "response": "bare", "label": "5"} in model.requests
    assert {"prompt": "How many?", "response": "many", "label": ["5", "6"]} in model.requests
    assert len(model.requests) == 20
    assert model.num_connections == model.max_at_once == 2


async def test_is_not_there_without_a_url() -> None:
    """Nobody asks a service that was not named."""
    async with reward_service() as (client, _):
        assert "remote" not in [profile.name for profile in await client.list_profiles()]


async def test_tries_again_what_may_pass() -> None:
    """A failing service is asked again, after a pause."""
    statuses = iter([500, 429, 200])
    async with (
        reward_model(lambda _: (next(statuses), "1")) as model,
        reward_service(remote={"url": model.url}) as (client, _),
    ):
        (verdict,) = await client.verify_batch([_item("r", deadline_s=50.0)], timeout_s=600.0)
    assert (verdict.status, verdict.score, len(model.requests)) == (OK, 1.0, 3)


async def test_what_fails_is_a_status_with_a_logged_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A remote service that gives no number is never a silent 0; only what may pass is asked again."""
    no_number = "it must answer a number"
    cases = {
        "busy": (500, "", 3, "500"),
        "lost": (404, "no such path", 1, "it answered with HTTP status 404: 'no such path'"),
        "words": (200, "fine", 1, "is not JSON"),
        "nan": (200, "NaN", 1, no_number),
        "string": (200, '"1"', 1, no_number),
        "bool": (200, "true", 1, no_number),
        "huge": (200, "1" + 400 * "0", 1, no_number),
        "other": (200, '{"result": 1}', 1, no_number),
    }
    async with reward_model(lambda request: cases[request["response"]][:2]) as model:
        settings = {"remote": {"url": model.url}, "profiles": {"remote": {"reward_min": 0.0}}}
        async with reward_service(**settings) as (client, _):
            for response, (_, _, num_requests, reason) in cases.items():
                model.requests.clear()
                (verdict,) = await client.verify_batch([_item(response)], timeout_s=600.0)
                assert (verdict.status, verdict.score, len(model.requests)) == (_FAILED, 0.0, num_requests), response
                logged = capsys.readouterr().out
                assert "remote.failed" in logged, response
                assert reason in logged, response


async def test_a_service_out_of_reach_is_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused connections are tried again, and then FAILED."""
    async with reward_service(remote={"url": "http://127.0.0.1:9/"}) as (client, _):
        (verdict,) = await client.verify_batch([_item("r")], timeout_s=600.0)
    assert verdict.status == _FAILED
    assert "ConnectError" in capsys.readouterr().out


async def test_the_items_deadline_bounds_all_tries() -> None:
    """A service that hangs costs the item its deadline, not the limits of its tries together."""
    async with reward_model(lambda _: (200, "1")) as model:
        model.hangs = True
        async with reward_service(remote={"url": model.url, "timeout_s": 0.2}) as (client, _):
            (verdict,) = await client.verify_batch([_item("r", deadline_s=0.5)], timeout_s=600.0)
    assert (verdict.status, verdict.score) == (TIMEOUT, 0.0)
    assert len(model.requests) >= 1


async def test_a_try_has_a_limit_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the service answers byte by byte; then it is asked again, and then FAILED."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)  # well within the limit of a try

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        verify = RemoteVerifier(RemoteConfig(url=url, timeout_s=0.2), max_tries=2)
        finding, _ = await promptly(verify.verify(Item(golds=["5"], response="r", profile="remote"), 600.0))
        await verify.close()
    assert finding.status is Status.FAILED
    assert "a try took longer than 0.2 s" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999/", "https://\0/", "ftp://host/"])
def test_a_url_that_is_none_is_a_mistake_in_the_settings(url: str) -> None:
    """Told at the start, not by every item."""
    with pytest.raises(pydantic.ValidationError, match="url"):
        RemoteConfig(url=url)


async def test_cancelling_ends_the_request() -> None:
    """When the caller is gone, nobody waits for the remote service, and its connection is closed."""
    async with reward_model(lambda _: (200, "1")) as model:
        model.hangs = True
        verify = RemoteVerifier(RemoteConfig(url=model.url))
        task = asyncio.create_task(verify.verify(Item(golds=["5"], response="\ud800", profile="remote"), 30.0))
        await until(lambda: len(model.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await verify.close()
    assert model.requests[0]["response"] == "\ufffd"
