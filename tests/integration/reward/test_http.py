"""The reward service over real HTTP: its own dialect, slime's and OpenRLHF's, with real worker processes."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.clients import RewardClient
from penstock.errors import ConfigError
from penstock.http.json_body import parse_json
from services.reward.admission_queue import MAX_ITEMS
from services.reward.config import MAX_DEADLINE_S, RewardConfig
from services.reward.frontends.http import openrlhf, slime
from services.reward.frontends.http.openrlhf import response_in
from services.reward.server import RunningService, running
from tests.support.reward.service import end_items, item_of
from tests.support.waiting import HANG_S, until

pytestmark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")

HANGS = {"golds": ["5"], "response": r"\boxed{10000000!}", "profile": "math_verify", "deadline_s": 30}


@contextlib.asynccontextmanager
async def serving(
    *, max_items: int = MAX_ITEMS, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, RunningService]]:
    """A service whose items have time on a busy machine too, and a client of its HTTP frontend."""
    async with running(
        RewardConfig.model_validate({"deadline_s": MAX_DEADLINE_S, **settings}), max_items=max_items
    ) as service:
        limits = httpx.Limits(max_connections=None)
        url = f"http://{service.http.address}"
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as client:
            yield client, service


@pytest.fixture(scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service with the usual settings."""
    async with serving() as (client, _):
        yield client


async def post(client: httpx.AsyncClient, path: str, body: object) -> httpx.Response:
    """Post JSON as trainers' libraries write it: ASCII, lone surrogates as escapes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.post(path, content=data, headers={"Content-Type": "application/json"})


def item(response: str = r"\boxed{5}", **fields: object) -> dict[str, object]:
    return {"golds": ["5"], "response": response, "profile": "math"} | fields


async def test_one_item_is_judged(http: httpx.AsyncClient) -> None:
    """The verdict says what the contract's says."""
    response = await post(http, "/v1/verify", item(item_id="a"))
    verdict = response.json()
    assert response.status_code == 200
    assert verdict.pop("elapsed_s") >= 0
    assert verdict == {"item_id": "a", "score": 1.0, "status": "OK", "extracted": "5", "method": "EXACT"}


async def test_a_batch_is_judged_in_order(http: httpx.AsyncClient) -> None:
    """Whoever decides."""
    items = [
        item(rf"\boxed{{{5 + n % 2}}}", item_id=str(n), profile="math_verify" if n % 3 else "math") for n in range(30)
    ]
    verdicts = (await post(http, "/v1/verify:batch", {"items": items})).json()["verdicts"]
    assert [verdict["item_id"] for verdict in verdicts] == [str(n) for n in range(30)]
    assert [verdict["score"] for verdict in verdicts] == [1, 0] * 15


async def test_an_item_ends_by_its_own_deadline(http: httpx.AsyncClient) -> None:
    """Not by the service's."""
    assert (await post(http, "/v1/verify", HANGS | {"deadline_s": 0.5})).json()["status"] == "TIMEOUT"


async def test_an_empty_batch_has_no_verdicts(http: httpx.AsyncClient) -> None:
    """It is no error."""
    assert (await post(http, "/v1/verify:batch", {"items": []})).json() == {"verdicts": []}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/verify", b"{", 400, "the body is not JSON: "),
        ("/v1/verify", item(deadline_s=-1), 422, "deadline_s = -1: "),
        ("/v1/verify", item(deadline_s=True), 422, "deadline_s = True: "),
        ("/v1/verify", item(**{f"k{n}": 0 for n in range(5000)}), 400, "the body has an object with 5003 keys"),
        ("/v1/verify", b'{"golds": [], "response": "", "profile": "math", "deadline_s": 1e999}', 400, "the body holds"),
        ("/v1/verify", b'{"golds": [], "response": "", "profile": "math", "deadline_s": NaN}', 400, "the body holds"),
        ("/v1/verify", item(profile="mth"), 422, "profile 'mth' is unknown; known: "),
        ("/v1/verify", item(golds="5"), 422, "golds = '5': "),
        ("/v1/verify", item(golds=[5]), 422, "golds.0 = 5: "),
        ("/v1/verify", item(respons="x"), 422, "respons is unknown; leave it out"),
        ("/v1/verify", {"golds": ["5"]}, 422, "response is missing; profile is missing"),
        ("/v1/verify", b'{"golds": [], "golds": [], "response": "", "profile": "math"}', 400, "the body has 'golds'"),
        ("/v1/verify:batch", {"items": [item(), {}]}, 422, "items.1.golds is missing"),
        ("/v1/verify:batch", {"items": [item()] * 5000}, 422, "5000 items are more than the queue holds"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: object, status: int, message: str
) -> None:
    """Field, value and remedy."""
    response = await post(http, path, body)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("text", ["\ud800", "\udfff\ud800", "\x00", "x" * 5_000_000, "é√"])
@pytest.mark.parametrize("path", ["/v1/verify", "/", "/get_reward"])
async def test_strange_and_huge_texts_are_answered(http: httpx.AsyncClient, path: str, text: str) -> None:
    """In the response, the prompt, the label and the id: never an internal error, and nothing that cannot travel."""
    response, label = text + r"\boxed{5}", "5" + text[:10]
    body: dict[str, object] = {
        "/v1/verify": item(response, golds=[label, "5"], item_id=text[:100], prompt=text),
        "/": {"prompt": text, "response": response, "label": [label, "5"]},
        "/get_reward": {"query": [text + response], "prompts": [text], "labels": [[label, "5"]]},
    }[path]
    answer = await post(http, path, body)
    assert answer.status_code == 200
    assert "1.0" in answer.content.decode()
    boxed = await post(http, "/v1/verify", item(rf"\boxed{{{text[:100]}}}"))
    assert boxed.status_code == 200
    boxed.content.decode()


async def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    """Slime's and OpenRLHF's samples, whose clients give up, wait instead."""
    async with serving(workers=1, max_items=1) as (client, service):
        hanging = asyncio.create_task(post(client, "/v1/verify", HANGS))
        await until(lambda: service.pool.num_busy == 1)
        waiting = [
            asyncio.create_task(post(client, "/", {"response": r"\boxed{5}", "label": "5"})),
            asyncio.create_task(post(client, "/get_reward", {"query": [r"\boxed{5}"], "labels": ["5"]})),
        ]
        refused = await post(client, "/v1/verify", item())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "OVERLOADED"
        end_items(service.pool)
        assert (await hanging).json()["status"] == "OUT_OF_MEMORY"
        slime, openrlhf = await asyncio.gather(*waiting)
        assert slime.json() == 1.0
        assert openrlhf.json()["rewards"] == [1.0]
        assert (await post(client, "/v1/verify", item())).status_code == 200


@pytest.mark.parametrize("path", ["/v1/verify", "/", "/get_reward"])
async def test_a_client_that_goes_away_has_its_worker_killed(path: str) -> None:
    """Its place is free for others."""
    bodies = {
        "/v1/verify": HANGS,
        "/": {"response": HANGS["response"], "label": "5"},
        "/get_reward": {"query": [HANGS["response"]], "labels": ["5"]},
    }
    async with serving(workers=1, max_items=1, deadline_s=30, http_profile="math_verify") as (client, service):
        before = service.pool.num_killed
        leaving = asyncio.create_task(post(client, path, bodies[path]))
        await until(lambda: service.pool.num_busy == 1)
        leaving.cancel()
        await asyncio.wait((leaving,))
        await until(lambda: service.pool.num_busy == 0 and service.pool.num_killed == before + 1)
        assert (await post(client, "/v1/verify", item(profile="math_verify"))).json()["score"] == 1.0


@pytest.mark.parametrize(
    ("label", "score"),
    [("5", 1.0), (5, 1.0), (5.0, 1.0), (["4", "5"], 1.0), ("6", 0.0), ([], 0.0), (None, 0.0)],
)
@pytest.mark.parametrize("path", ["/", "/slime"])
async def test_slime_gets_a_bare_number(http: httpx.AsyncClient, path: str, label: object, score: float) -> None:
    """The whole body is the reward; the header says how it was reached."""
    response = await post(http, path, {"prompt": "2+3?", "response": r"\boxed{5}", "label": label})
    assert response.status_code == 200
    assert response.json() == score
    assert response.headers["x-penstock-status"] == ("OK" if label else "GOLD_INVALID")


async def test_slime_may_send_the_end_of_text_token(http: httpx.AsyncClient) -> None:
    """It does by default: `rollout_skip_special_tokens` is off."""
    answers = [
        (await post(http, "/", {"response": response, "label": "5"})).json()
        for response in ("The answer is $5$.<|im_end|>", r"\boxed{5}. No, the answer is 6.<|im_end|>")
    ]
    assert answers == [1.0, 0.0]


async def test_slime_names_its_profile_in_the_url(http: httpx.AsyncClient) -> None:
    """A number is the gold answer as it is written: 8.5 is a rounded label of geo3k, and 8.46 is near enough."""
    body = b'{"prompt": [{"role": "user", "content": "?"}], "response": "\\\\boxed{8.46}", "label": 8.5}'
    assert (await post(http, "/?profile=geo3k", body)).json() == 1.0
    assert (await post(http, "/", body)).json() == 0.0
    refused = await post(http, "/?profile=mth", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"label": NaN, "response": "5"}',
        b"{}",
        b'{"response": "5"}',
        b"\xff\xfe",
        b"[" * 10_000,
    ]
    + [json.dumps({"response": "5", "label": label}).encode() for label in (True, {"a": 1}, [[1]])]
    + [json.dumps({"response": response, "label": "5"}).encode() for response in (None, ["5"])],
)
async def test_slime_gets_a_number_even_for_what_is_no_sample(http: httpx.AsyncClient, body: bytes) -> None:
    """Zero, with headers that say that it is no finding, and why."""
    response = await post(http, "/", body)
    assert (response.status_code, response.json()) == (200, 0.0)
    assert response.headers["x-penstock-status"] == "INVALID_REQUEST"
    assert response.headers["x-penstock-error"]


async def test_slime_gets_zero_for_what_could_not_be_judged_on_any_scale() -> None:
    """The lowest reward is for wrong answers only."""
    async with serving(profiles={"math": {"reward_min": -1.0}}) as (client, _):
        wrong = await post(client, "/", {"response": r"\boxed{6}", "label": "5"})
        unjudged = await post(client, "/", {"response": r"\boxed{6}", "label": ""})
    assert (wrong.json(), wrong.headers["x-penstock-status"]) == (-1.0, "OK")
    assert (unjudged.json(), unjudged.headers["x-penstock-status"]) == (0.0, "GOLD_INVALID")


async def test_openrlhf_gets_rewards_scores_and_logs() -> None:
    """Rewards on the profile's scale, scores from 0 to 1, one entry for each query."""
    async with serving(profiles={"math": {"reward_min": -1.0, "reward_max": 2.0}}) as (client, _):
        prompts = [r"user: put it in \boxed{}. 2+3? assistant: "] * 4
        responses = [r"\boxed{5}<|im_end|>", r"\boxed{6}</s>", "none", r"\boxed{5}"]
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        body = {"query": queries, "prompts": prompts, "labels": ["5", 5, "5", None]}
        answer = (await post(client, "/get_reward", body)).json()
    assert answer["rewards"] == [2.0, -1.0, -1.0, -1.0]
    assert answer["scores"] == [1.0, 0.0, 0.0, 0.0]
    assert answer["statuses"] == ["OK", "OK", "NO_ANSWER", "GOLD_INVALID"]
    assert answer["extra_logs"] == {"no_answer": [0.0, 0.0, 1.0, 0.0], "not_judged": [0.0, 0.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": ["5"]}, "labels is missing; set --data.label_key"),
        ({"labels": ["5"]}, "query is missing"),
        ({"query": ["5", "6"], "labels": ["5"]}, "labels has 1 entries and query has 2"),
        ({"query": ["5"], "labels": ["5"], "prompts": ["a", "b"]}, "prompts has 2 entries and query has 1"),
        ({"query": [5.0, None], "labels": ["5", "5"]}, "query.1 is not a string"),
        ({"query": ["5"], "labels": [True]}, "labels.0 = True: a label is"),
        ([], "the body is not a JSON object"),
    ],
)
async def test_openrlhf_is_told_what_is_wrong(http: httpx.AsyncClient, body: object, message: str) -> None:
    """With a status that its client raises on, rather than with zeros."""
    response = await post(http, "/get_reward", body)
    assert response.status_code == 422
    assert response.json()["error"]["message"].startswith(message)


async def test_large_bodies_of_trainers_are_parsed_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of long samples would hold up all other calls."""
    parsers: list[int] = []

    def parse(body: bytes, **options: Any) -> Any:
        parsers.append(threading.get_ident())
        return parse_json(body, **options)

    for frontend in (openrlhf, slime):
        monkeypatch.setattr(frontend, "parse_json", parse)
    prompt, response = "x" * 2**19, r"\boxed{5}"
    answer = await post(http, "/get_reward", {"query": [prompt + response], "prompts": [prompt], "labels": ["5"]})
    assert answer.json()["rewards"] == [1.0]
    assert (await post(http, "/slime", {"prompt": prompt, "response": response, "label": "5"})).json() == 1.0
    assert [each != threading.get_ident() for each in parsers] == [True, True]


@pytest.mark.parametrize(
    ("query", "prompt", "response"),
    [
        ("PQ: answer</s>", "PQ: ", "answer"),
        ("answer<|im_end|>\n", "", "answer"),
        ("answer <|im_end|>\n<|endoftext|><|endoftext|>", "", "answer"),
        ("<s>PQ: answer", "PQ: ", "answer"),
        ("t" * 99 + "answer", "cut off " + "t" * 99, "answer"),
        ("something else", "PQ: ", "something else"),
        ("PQ: </s> in the middle", "PQ: ", "</s> in the middle"),
        ("PQ: </s>", "PQ: </s>", ""),
        ("", "", ""),
    ],
)
def test_the_response_is_what_follows_the_prompt(query: str, prompt: str, response: str) -> None:
    """Without ends of text and white space after it."""
    assert response_in(query, prompt) == response


@pytest.mark.timeout(HANG_S)
def test_stripping_a_flood_of_ends_of_text_is_linear() -> None:
    """What is quadratic does not come to the end of five megabytes of them."""
    assert response_in("a" + "</s>\n" * 1_000_000, "") == "a"
    assert response_in("a" + " " * 50_000_000, "") == "a"


async def test_profiles_are_listed(http: httpx.AsyncClient) -> None:
    """By name, with what each does."""
    profiles = (await http.get("/v1/profiles")).json()["profiles"]
    names = [profile["name"] for profile in profiles]
    assert {"math", "geo3k"} <= set(names)
    assert names == sorted(names)
    assert all(profile["description"] for profile in profiles)


async def test_the_openapi_page_describes_every_route(http: httpx.AsyncClient) -> None:
    """Each with a summary, and each field of an item with what it means."""
    page = (await http.get("/openapi.json")).json()
    assert {"/", "/slime", "/get_reward", "/v1/verify", "/v1/verify:batch", "/v1/profiles", "/healthz", "/metrics"} == (
        set(page["paths"])
    )
    fields = page["components"]["schemas"]["VerifyItem"]["properties"]
    assert all(field["description"] for field in fields.values())
    assert (await http.get("/docs")).status_code == 200


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    """The values on the page, by name and labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_metrics_count_what_was_judged_on_both_faces() -> None:
    """By profile, status and method; and tell how full the service is."""
    async with serving(workers=1) as (client, service), RewardClient(service.rpc.address) as rpc:
        items = 'penstock_reward_items_total{method="EXACT",profile="math",status="OK"}'
        seconds = 'penstock_reward_item_seconds_count{method="EXACT"}'
        before = await metrics_of(client)  # of other tests in this process
        hanging = asyncio.create_task(post(client, "/v1/verify", HANGS))
        await until(lambda: service.pool.num_busy == 1)
        await post(client, "/v1/verify", item())
        await rpc.verify(item_of("5", r"\boxed{5}"), timeout_s=30)
        after = await metrics_of(client)
        assert [after[name] - before.get(name, 0.0) for name in (items, seconds)] == [2.0, 2.0]
        assert after['penstock_http_requests_total{route="/v1/verify",status="200"}'] >= 1
        lines = (await client.get("/metrics")).text.splitlines()
        assert "penstock_reward_queue_items 1.0" in lines
        assert "penstock_reward_workers_busy 1.0" in lines
        end_items(service.pool)
        await hanging
        lines = (await client.get("/metrics")).text.splitlines()
        assert "penstock_reward_workers_killed 1.0" in lines


async def test_draining_tells_health_checks_first_and_finishes_what_runs() -> None:
    """/healthz is 503 while the call in progress goes on to its verdict."""
    stack = contextlib.AsyncExitStack()
    service = await stack.enter_async_context(running(RewardConfig(workers=1), grace_s=HANG_S))
    async with httpx.AsyncClient(base_url=f"http://{service.http.address}", timeout=HANG_S) as client:
        assert (await client.get("/healthz")).status_code == 200
        hanging = asyncio.create_task(post(client, "/v1/verify", HANGS))
        await until(lambda: service.pool.num_busy == 1)
        stopping = asyncio.create_task(stack.aclose())

        async def is_draining() -> bool:
            return (await client.get("/healthz")).status_code == 503

        await until(is_draining)
        assert (await post(client, "/v1/verify", item())).status_code == 503
        end_items(service.pool)
        assert (await hanging).json()["status"] == "OUT_OF_MEMORY"
        await stopping


async def test_an_unknown_http_profile_is_a_mistake_in_the_settings() -> None:
    """Told at the start, not by a zero for every sample."""
    with pytest.raises(ConfigError, match=r"reward.http_profile: profile 'mth' is unknown; known: "):
        async with running(RewardConfig(http_profile="mth")):
            pass
