"""An evaluation over an OpenAI-compatible API, against a server that says and refuses what it is told."""

import base64
import json
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.clients import RewardClient
from penstock.errors import ConfigError, SetupError, UserError
from penstock.runtime.backoff import Backoff
from penstock.v1 import reward_pb2
from services.reward import server as reward_server
from services.reward.config import RewardConfig
from services.trainer.data.config import DataConfig
from services.trainer.evaluation import openai_server
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.openai_player import OpenAiPlayer
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from tests.support.openai_api import Api, serving_api
from tests.support.trainer.data.pictures import jpeg
from tests.support.trainer.outcomes import appending_to
from tests.support.waiting import promptly

pytestmark = pytest.mark.leaves_behind("the reward pool replaces workers, and their pipes", "descriptor")


@pytest.fixture
def api() -> Iterator[Api]:
    """A server on a free port of this machine."""
    with serving_api() as found:
        yield found


@pytest.fixture(scope="module")
async def verifier() -> AsyncIterator[RewardClient]:
    """The real reward service."""
    async with reward_server.running(RewardConfig(workers=1)) as service, RewardClient(service.rpc.address) as client:
        yield client


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, EvaluationSet]:
    """Two rows, the first with a picture."""
    return make_sets(
        tmp_path,
        temperature=0.5,
        top_k=3,
        samples_per_prompt=2,
        chat_template_kwargs={"enable_thinking": False},
    )


def make_sets(folder: Path, **settings: object) -> dict[str, EvaluationSet]:
    """The same with other settings."""
    file = folder / "a.jsonl"
    picture = base64.b64encode(jpeg()).decode()
    rows = [
        {"images": [picture], "problem": "<image>Find x.", "answer": "3"},
        {"images": [], "problem": "1 + 1?", "answer": "2"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvaluationSetConfig.model_validate(
        {"path": str(file), "profile": "math", "max_new_tokens": 16, **settings}
    )
    return open_sets(EvaluationConfig(sets={"s": config}), DataConfig())


async def play(
    api: Api,
    verifier: RewardClient,
    sets: dict[str, EvaluationSet],
    *,
    model: str = "",
    key: str = "",
    played: Collection[tuple[str, int]] = (),
) -> list[PlayedPrompt]:
    """The outcomes in the order of the rows, without those of `played`."""
    outcomes: list[PlayedPrompt] = []
    async with OpenAiPlayer(api.url, model=model, api_key=key, verifier=verifier, concurrency=2) as player:
        await promptly(player.play(sets, on_played=appending_to(outcomes), played=played))
    return sorted(outcomes, key=lambda each: each.row)


async def test_every_row_is_asked_and_judged(api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]) -> None:
    """Messages and sampling as the set has them, pictures as data URIs, the key as bearer token."""
    first, second = await play(api, verifier, sets, key="secret")
    assert [(sample.score, sample.extracted, sample.num_tokens) for sample in first.samples] == [(1.0, "3", 7)] * 2
    assert [sample.score for sample in second.samples] == [0.0, 0.0]
    assert api.keys == {"Bearer secret"}
    assert len(api.requests) == 4
    with_picture = next(request for request in api.requests if isinstance(request["messages"][0]["content"], list))
    image, text = with_picture["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == jpeg()
    assert text == {"type": "text", "text": "Find x."}
    assert with_picture["chat_template_kwargs"] == {"enable_thinking": False}
    assert {name: with_picture[name] for name in ("model", "temperature", "top_k", "max_tokens")} == {
        "model": "m",
        "temperature": 0.5,
        "top_k": 3,
        "max_tokens": 16,
    }
    assert next(request for request in api.requests if request is not with_picture)["messages"] is not None


async def test_verifiers_hear_what_was_asked(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training."""
    asked: set[str] = set()
    verify_batch = verifier.verify_batch

    async def listen(items: Sequence[reward_pb2.VerifyItem], **times: Any) -> list[reward_pb2.Verdict]:
        asked.update(item.prompt for item in items)
        return await verify_batch(items, **times)

    monkeypatch.setattr(verifier, "verify_batch", listen)
    await play(api, verifier, sets)
    assert asked == {"<image>Find x.", "1 + 1?"}


async def test_tool_calls_are_asked_with_ids(api: Api, verifier: RewardClient, tmp_path: Path) -> None:
    """In OpenAI's form, which wants each answer of a tool to name its call."""
    calls = [{"name": "zoom", "arguments": {"factor": 2}}, {"name": "find", "arguments": {"label": "é"}}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": messages, "answer": "3"}))
    config = EvaluationSetConfig(path=str(tmp_path / "a.jsonl"), profile="math")
    [outcome] = await play(api, verifier, open_sets(EvaluationConfig(sets={"s": config}), DataConfig()))
    _, assistant, *tools = api.requests[0]["messages"]
    asked = [call["function"] for call in assistant["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in asked] == [
        ("zoom", {"factor": 2}),
        ("find", {"label": "é"}),
    ]
    assert len({call["id"] for call in assistant["tool_calls"]}) == 2
    assert [each["tool_call_id"] for each in tools] == [call["id"] for call in assistant["tool_calls"]]
    assert outcome.messages[1]["tool_calls"] == calls


async def test_a_cut_answer_is_truncated(api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]) -> None:
    """As one of an engine is."""
    api.finish_reason = "length"
    [first, _] = await play(api, verifier, sets)
    assert all(sample.is_truncated for sample in first.samples)


async def test_a_busy_server_is_asked_again(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many requests, failures of the server, and what it refuses only for now are waited out."""
    monkeypatch.setattr(openai_server, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    api.refusals = [(429, "busy"), (503, "starting"), (408, "slow"), (409, "locked"), (425, "early")]
    assert [len(each.samples) for each in await play(api, verifier, sets)] == [2, 2]


async def test_a_limit_per_minute_is_waited_out(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the server refuses: it answers, only not now."""
    monkeypatch.setattr(openai_server, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    api.refusals, api.retry_after = [(429, "slow down")] * 20, "0.001"
    assert [len(each.samples) for each in await play(api, verifier, sets)] == [2, 2]


@pytest.mark.parametrize(
    ("reason", "patience_s", "words"),
    [
        (
            "slow down",
            0.0,
            r"refuses one request for more than 0 s .*: HTTP 429: .*slow down.*; lower worker\.concurrency",
        ),
        ("insufficient_quota", 900.0, "HTTP 429: .*insufficient_quota.*check it and OPENAI_API_KEY"),
    ],
)
async def test_a_limit_that_stays_ends_the_evaluation(
    *,
    api: Api,
    verifier: RewardClient,
    sets: dict[str, EvaluationSet],
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    patience_s: float,
    words: str,
) -> None:
    """With what to do about it."""
    monkeypatch.setattr(openai_server, "_LIMITED_PATIENCE_S", patience_s)
    api.refusals = [(429, reason)] * 4
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, sets)
    assert raised.group_contains(UserError, match=words)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("20", 20.0),
        ("0.5", 0.5),
        ("", 0.0),
        ("soon", 0.0),
        ("-3", 0.0),
        ("Fri, 27 Nov 2026 08:00:30 GMT", 30.0),
        ("Fri, 27 Nov 2026 08:00:30", 0.0),
    ],
)
def test_how_long_a_server_asks_to_wait(value: str, seconds: float) -> None:
    """In seconds, or until a date by its own clock."""
    headers = {"retry-after": value, "date": "Fri, 27 Nov 2026 08:00:00 GMT"}
    assert openai_server.retry_after_s(headers) == seconds
    assert openai_server.retry_after_s({"retry-after": "Fri, 27 Nov 2026 08:00:30 GMT"}) == 0.0


async def test_a_refused_prompt_fails_alone(api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]) -> None:
    """The server's reason is kept."""
    api.refusals = [(400, "too long")]
    outcomes = await play(api, verifier, sets)
    assert sorted("too long" in each.error for each in outcomes) == [False, True]


@pytest.mark.parametrize("played", [[], [("s", 0)]], ids=["beside another", "the only one left"])
async def test_a_prompt_that_breaks_the_server_fails_alone(
    *,
    api: Api,
    verifier: RewardClient,
    sets: dict[str, EvaluationSet],
    monkeypatch: pytest.MonkeyPatch,
    played: list[tuple[str, int]],
) -> None:
    """Also after --resume, where no other is asked: the server answers one that is not of the set."""
    monkeypatch.setattr(openai_server, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    api.breaks_at = "1 + 1?"
    *answered, broken = await play(api, verifier, sets, played=played)
    assert [each.error for each in answered] == [""] * (1 - len(played))
    assert broken.error.startswith(f"{api.url} fails at the prompt: HTTP 500: ")
    api.breaks_with = 0
    *_, broken = await play(api, verifier, sets, played=played)
    assert broken.error.startswith(f"{api.url} fails at the prompt: RemoteProtocolError: ")


async def test_a_server_that_is_too_busy_for_a_prompt_ends_the_evaluation(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it is at fault, although it has an answer to a short prompt; --resume goes on later."""
    monkeypatch.setattr(openai_server, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    api.breaks_at, api.breaks_with = "1 + 1?", 503
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, sets)
    assert raised.group_contains(SetupError, match="does not answer: HTTP 503: ")


async def test_a_server_that_fails_at_everything_ends_the_evaluation(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is at fault, and not the prompts, which are played when it is back."""
    monkeypatch.setattr(openai_server, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    api.refusals = [(500, "out of memory")] * 100
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, sets)
    assert raised.group_contains(SetupError, match="does not answer: HTTP 500: .*out of memory.*; start it")


async def test_a_reasoning_model_is_asked_by_its_own_names(api: Api, verifier: RewardClient, tmp_path: Path) -> None:
    """Its refusal of `max_tokens` costs one request, and no prompt."""
    api.is_reasoning = True
    sets = make_sets(tmp_path, temperature=1.0)
    async with OpenAiPlayer(api.url, model="m", api_key="", verifier=verifier, concurrency=1) as player:
        played: list[PlayedPrompt] = []
        await promptly(player.play(sets, on_played=appending_to(played)))
    assert [(each.error, len(each.samples)) for each in played] == [("", 1), ("", 1)]
    asked = [(request.get("max_tokens"), request.get("max_completion_tokens")) for request in api.requests]
    assert asked == [(16, None), (None, 16), (None, 16)]
    assert not any("top_p" in request for request in api.requests)


async def test_a_temperature_that_the_model_does_not_take(api: Api, verifier: RewardClient, tmp_path: Path) -> None:
    """Every request would be refused: one error with the remedy."""
    api.is_reasoning = True
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, make_sets(tmp_path, temperature=0.5))
    assert raised.group_contains(
        ConfigError, match=r"refuses temperature = 0\.5: .*; set temperature = 1 in the evaluation set"
    )


async def test_a_prompt_that_is_too_long_names_max_tokens(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]
) -> None:
    """As vLLM's refusal does; it is of one prompt, and the name stays."""
    api.refusals = [(400, "'max_tokens' or 'max_completion_tokens' is too large: 16. The maximum is 8.")]
    outcomes = await play(api, verifier, sets)
    assert sorted("too large" in each.error for each in outcomes) == [False, True]
    assert all("max_tokens" in request for request in api.requests)


async def test_a_refused_key_ends_the_evaluation(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]
) -> None:
    """Every other request would be refused, too."""
    api.refusals = [(401, "who are you?")] * 4
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, sets)
    assert raised.group_contains(ConfigError, match="HTTP 401: .*who are you.*check it and OPENAI_API_KEY")


async def test_one_of_several_models_must_be_named(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]
) -> None:
    """The error lists them; a named one is not looked for."""
    api.models = ["b", "a"]
    with pytest.raises(ConfigError, match=r"has 2 models \(a, b\); name one with --url-model"):
        await play(api, verifier, sets)
    await play(api, verifier, sets, model="b")
    assert {request["model"] for request in api.requests} == {"b"}


async def test_an_address_that_redirects_names_the_other(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet]
) -> None:
    """As one of http whose server wants https: a request that is followed would lose its body, or its key."""
    api.moved_to = "https://example.test/v1"
    words = r"--url http://\S+ redirects to https://example\.test/v1, .*give the address of the API itself"
    with pytest.raises(ConfigError, match=words):
        await play(api, verifier, sets)
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, sets, model="m")
    assert raised.group_contains(ConfigError, match=words)


@pytest.mark.parametrize(
    ("page", "status", "words"),
    [
        ("<!DOCTYPE html><title>Sign in", 200, r"/v1/models answered no JSON object, but text/html: '<!DOCTYPE html>"),
        ("<h1>Method not allowed</h1>", 405, r"refuses /models: HTTP 405: <h1>Method not allowed"),
        ('{"data": {"status": "up"}}', 200, r"it answered \{'data': \{'status': 'up'\}\}"),
    ],
)
async def test_a_page_is_no_api(
    api: Api, verifier: RewardClient, sets: dict[str, EvaluationSet], page: str, status: int, words: str
) -> None:
    """A person who gave the address of one reads what came from there, before anything is played."""
    api.page, api.page_status = page, status
    with pytest.raises(
        ConfigError, match=rf"^--url {api.url} lists no models .*{words}.*; give the address of the API"
    ):
        await play(api, verifier, sets)
    assert api.requests == []


async def test_nobody_at_the_address(verifier: RewardClient, sets: dict[str, EvaluationSet]) -> None:
    """Found before anything is played, without a minute of attempts."""
    with pytest.raises(SetupError, match=r"--url http://127\.0\.0\.1:1/v1 does not answer: ConnectError"):
        await promptly(play(Api(url="http://127.0.0.1:1/v1"), verifier, sets))


async def test_environments_with_turns_are_refused(api: Api, verifier: RewardClient, tmp_path: Path) -> None:
    """An API has no turns that an environment could take."""
    with pytest.raises(ExceptionGroup) as raised:
        await play(api, verifier, make_sets(tmp_path, environment="tools"))
    assert raised.group_contains(ConfigError, match="environment 'tools' cannot be played by --url")
