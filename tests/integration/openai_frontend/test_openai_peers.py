"""The cases of vLLM's and SGLang's own suites: which of them this server answers as they do."""

import itertools
import json
import re
from typing import Any

import pytest

from tests.support.router.openai_harness import Harness
from tests.support.router.peer_cases import Case, cases

CASES = cases()

NOT_ANSWERED = {
    "chat: image by http": "a server that fetches URLs reaches networks that its callers cannot",
    "chat: max_tokens over the context": "it is cut to what the context leaves",
    "chat: own role": "roles are OpenAI's",
    "chat: penalty": "the policy's distribution is not changed",
    "chat: stop_regex": "engines have no text",
    "chat: structural tag": "tool_choice and tools serve its purpose",
    "completion: allowed_token_ids": "the policy's distribution is not changed",
    "completion: fewer min_tokens": "engines know no minimum beside the maximum",
    "completion: logit_bias": "the policy's distribution is not changed",
    "completion: skip_special_tokens": "special tokens have no text; their ids are returned",
    "GET /load": "the router's own service tells of load",
    "GET /metrics": "the router's own service tells of load",
    "invocations": "another word for /v1/chat/completions, of one cloud",
}
"""And why not."""


def test_the_cases_have_names_of_their_own() -> None:
    """There are more than two hundred, and at most one in ten is not answered."""
    names = [case.name for case in itertools.chain.from_iterable(CASES.values())]
    assert len(set(names)) == len(names) > 200
    assert set(NOT_ANSWERED) <= set(names)
    assert 10 * len(NOT_ANSWERED) < len(names)


async def _answer(harness: Harness, case: Case) -> tuple[int, list[dict[str, Any]]]:
    harness.says(case.says)
    for engine in harness.engines:
        engine.requests.clear()
    verb, _, path = case.path.rpartition(" ")
    body = case.body if "tokenize" in path else {"model": harness.run, **case.body}
    async with harness.http() as client:
        answer = await (client.get(path) if verb else client.post(path, json=body))
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        return answer.status_code, [json.loads(event) for event in events[:-1]]
    return answer.status_code, [answer.json()]


def _blames(case: Case, parts: list[dict[str, Any]]) -> bool:
    """Whether an error names a parameter that the request has."""
    param = parts[0]["error"]["param"] or ""
    return re.split(r"[.\[]", param)[0] in {"model", *case.body}


@pytest.mark.parametrize(
    "group",
    [pytest.param(name, marks=pytest.mark.slow if name in ("grid", "completions") else ()) for name in CASES],
)
async def test_cases_of_peers(harness: Harness, group: str) -> None:
    """Each is answered or refused as the peer does it; of those that are not, none is by a crash."""
    wrong: dict[str, Any] = {}
    for case in CASES[group]:
        status, parts = await _answer(harness, case)
        assert status < 500, (case.name, parts)
        is_right = case.holds(parts) and case.asks(harness.requests) if status == 200 else _blames(case, parts)
        if status != case.status or not is_right:
            wrong[case.name] = (status, parts)
    expected = {case.name for case in CASES[group]} & set(NOT_ANSWERED)
    assert set(wrong) == expected, {name: wrong.get(name) for name in set(wrong) ^ expected}
