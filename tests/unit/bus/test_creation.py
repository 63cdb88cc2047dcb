"""Creating and removing streams while a cluster elects its leader, or one server does not answer."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import nats.errors
import nats.js.errors
import pytest

from penstock.bus import answers
from penstock.bus.cluster import creation
from penstock.bus.connection import Bus
from penstock.config import BusConfig
from penstock.errors import SetupError

ERRORS = [
    nats.errors.TimeoutError(),
    nats.errors.NoRespondersError(),
    nats.js.errors.ServiceUnavailableError(code=503, description="JetStream system temporarily unavailable"),
]


class Attempts:
    """Fails with each error in turn, then returns."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "made"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(creation, "RETRY_S", 0.0)
    monkeypatch.setattr(answers, "RETRY_S", 0.0)


@pytest.mark.parametrize(("url", "replicas"), [("nats://a:4222", 3), ("nats://a:4222,nats://b:4222", 1)])
async def test_in_a_cluster_an_election_is_waited_for(url: str, replicas: int) -> None:
    """What is asked meanwhile is lost, refused, or answered by nobody."""
    config = BusConfig.model_validate({"url": url, "replicas": replicas})
    assert await creation.create(config, "stream S", Attempts(ERRORS)) == "made"


async def test_one_server_that_is_silent_is_waited_for() -> None:
    """It is frozen, or its machine is busy."""
    silent = Attempts([nats.errors.TimeoutError(), TimeoutError()])
    assert await creation.create(BusConfig(url="nats://a:4222"), "stream S", silent) == "made"


@pytest.mark.parametrize("error", ERRORS[1:], ids=lambda error: type(error).__name__)
async def test_what_one_server_answers_is_told_at_once(error: Exception) -> None:
    """It elects nothing, and would say the same again."""
    attempts = Attempts([error])
    with pytest.raises(SetupError, match=r"NATS at nats://a:4222: stream S could not be set up"):
        await creation.create(BusConfig(url="nats://a:4222"), "stream S", attempts)


@pytest.mark.parametrize("replicas", [1, 3])
async def test_silence_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    """The last error says why."""
    monkeypatch.setattr(answers, "ANSWER_S", 0.0)
    with pytest.raises(SetupError, match=r"could not be set up \(nats: timeout\)"):
        await creation.create(BusConfig(url="nats://a:4222", replicas=replicas), "stream S", Attempts(ERRORS))


async def test_a_refusal_is_no_election() -> None:
    """No leader would decide otherwise."""
    full = nats.js.errors.ServerError(code=500, description="insufficient storage resources available")
    config = BusConfig(url="nats://a:4222,nats://b:4222", replicas=1)
    with pytest.raises(SetupError, match="insufficient storage"):
        await creation.create(config, "stream S", Attempts([full]))


def not_written() -> Exception:
    """What a server says that moves the new consumer's file away while it writes the removed one's last state."""
    description = "rename /store/obs/trainer/o.dat.tmp /store/obs/trainer/o.dat: no such file or directory"
    return nats.js.errors.ServerError(code=500, err_code=10012, description=description)


async def test_a_consumer_is_made_though_the_removed_one_is_still_written() -> None:
    """A trainer, or an evaluation, that starts at a busy server."""
    attempts = Attempts([not_written(), not_written()])
    assert await creation.create(BusConfig(url="nats://a:4222"), "consumer C of stream S", attempts) == "made"


async def test_a_consumer_that_cannot_be_written_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, or broken."""
    monkeypatch.setattr(creation, "_SETTLING_S", 0.0)
    with pytest.raises(SetupError, match=r"consumer C of stream S could not be set up \(rename .*o.dat"):
        await creation.create(BusConfig(url="nats://a:4222"), "consumer C of stream S", Attempts([not_written()]))


class Streams:
    """Of a server that leaves every first question about a stream unanswered, after it did what was asked."""

    def __init__(self) -> None:
        self.asked = Counter[str]()

    async def delete_stream(self, name: str) -> None:
        self.asked[name] += 1
        if self.asked[name] == 1:
            raise nats.errors.TimeoutError
        raise nats.js.errors.NotFoundError


def bus_of(streams: Streams, config: BusConfig) -> Bus:
    client: Any = SimpleNamespace(jetstream=lambda **_: streams)
    return Bus(client, config, "run")


@pytest.mark.parametrize("url", ["nats://a:4222", "nats://a:4222,nats://b:4222,nats://c:4222"])
async def test_a_run_is_removed_though_answers_are_missing(url: str) -> None:
    """Each of its streams, though what was asked first had no answer."""
    streams = Streams()
    await bus_of(streams, BusConfig(url=url)).delete_run()
    assert set(streams.asked.values()) == {2}
    assert {"run_PROMPTS", "run_DEAD", "KV_run_locks"} <= streams.asked.keys()


async def test_a_server_that_stays_silent_removes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so, and can be called again."""
    monkeypatch.setattr(answers, "ANSWER_S", 0.0)
    with pytest.raises(nats.errors.TimeoutError):
        await bus_of(Streams(), BusConfig(url="nats://a:4222")).delete_run()
