"""The frontend for OpenRLHF: `--reward.remote_url http://HOST:PORT/get_reward` (formerly `--remote_rm_url`).

OpenRLHF posts {"query": [...], "prompts": [...], "labels": [...]}, tries five times on a status other than 2xx, and
reads "rewards" (for advantages), "scores" (0 to 1, for dynamic filtering) and "extra_logs" (numbers to log), one entry
for each query (openrlhf/utils/agent.py, examples/python/reward_func.py; before 0.8 openrlhf/utils/remote_rm_utils.py,
which reads only "rewards"). A query is prompt, response and end-of-text token, decoded with special tokens.
"""

import functools
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from penstock.errors import InvalidRequestError
from penstock.http.app import ErrorBody
from penstock.http.body_parsing import parse_body
from penstock.http.json_body import parse_json
from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.exact.text.end_of_text import drop_end_of_text
from services.reward.frontends.http.label import golds_of, text_of
from services.reward.item import Item
from services.reward.profiles.registry import find_profile
from services.reward.verifier import Verifier

_TAIL_CHARS = 64
"""Characters of a prompt that identify it."""
_MAX_CUTS = 64
_JUDGED = frozenset({Status.OK, Status.NO_ANSWER, Status.UNPARSEABLE, Status.TOO_LARGE})

_OPENAPI = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["query", "labels"],
                    "properties": {
                        "query": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "Prompt, response and end-of-text token in one string.",
                        },
                        "prompts": {
                            "type": "array",
                            "description": "Prompts to strip from the front of queries; absent if they hold none.",
                        },
                        "labels": {
                            "type": "array",
                            "items": {
                                "anyOf": [
                                    {"type": ["string", "number", "null"]},
                                    {"type": "array", "items": {"type": ["string", "number"]}},
                                ]
                            },
                            "description": "Gold answers for each query: one, or several, of which one must match.",
                        },
                    },
                },
                "example": {
                    "query": ["What is 2+3?\nIt is \\boxed{5}<|im_end|>"],
                    "prompts": ["What is 2+3?\n"],
                    "labels": ["5"],
                },
            }
        },
    }
}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One entry for each query.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["rewards", "scores", "extra_logs", "statuses"],
                    "properties": {
                        "rewards": _NUMBERS,
                        "scores": _NUMBERS,
                        "extra_logs": {"type": "object", "additionalProperties": _NUMBERS},
                        "statuses": {"type": "array", "items": {"type": "string"}},
                    },
                }
            }
        },
    },
    400: {"model": ErrorBody, "description": "The body is not JSON."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "A field is missing, or not a list of the right length."},
    429: {"model": ErrorBody, "description": "The room for bodies is full; try again later."},
    503: {"model": ErrorBody, "description": "The service is stopping."},
}


def add_routes(app: FastAPI, verifier: Verifier, config: RewardConfig) -> None:
    """Add /get_reward."""

    @app.post("/get_reward", tags=["openrlhf"], response_model=None, responses=_RESPONSES, openapi_extra=_OPENAPI)
    async def get_reward(request: Request, profile: str = config.http_profile) -> JSONResponse:
        """Verify samples for OpenRLHF, after prompt and end of text are stripped from each query."""
        find_profile(verifier.profiles, profile)
        items = await parse_body(request, functools.partial(_items, profile=profile))
        verdicts = await verifier.verify_when_free(items)
        statuses = [verdict.finding.status for verdict in verdicts]
        return JSONResponse(
            {
                "rewards": [verdict.score for verdict in verdicts],
                "scores": [verdict.finding.credit for verdict in verdicts],
                "extra_logs": {
                    "no_answer": [float(status is Status.NO_ANSWER) for status in statuses],
                    "not_judged": [float(status not in _JUDGED) for status in statuses],
                },
                "statuses": statuses,
            }
        )


def _items(body: bytes, profile: str) -> list[Item]:
    request = parse_json(body, numbers_as_text=True)
    if not isinstance(request, dict):
        raise InvalidRequestError("the body is not a JSON object; send query, prompts and labels")
    queries = _list(request, "query")
    labels = _list(request, "labels", len(queries))
    prompts = _list(request, "prompts", len(queries)) if request.get("prompts") else [""] * len(queries)
    items = []
    for index, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True)):
        if not isinstance(query, str):
            raise InvalidRequestError(f"query.{index} is not a string")
        prompt_text = text_of(prompt)
        response = response_in(query, prompt_text)
        golds = golds_of(label, field=f"labels.{index}")
        items.append(Item(golds=golds, response=response, profile=profile, prompt=prompt_text))
    return items


def _list(request: dict[str, Any], field: str, length: int | None = None) -> list[Any]:
    value = request.get(field)
    if value is None:
        remedy = "; set --data.label_key to the dataset's column of answers" if field == "labels" else ""
        raise InvalidRequestError(f"{field} is missing{remedy}")
    found = value if isinstance(value, list) else [value]
    if length is not None and len(found) != length:
        raise InvalidRequestError(f"{field} has {len(found)} entries and query has {length}; send one for each query")
    return found


def response_in(query: str, prompt: str) -> str:
    """Return the response in `query`: the text after the prompt, without end-of-text tokens and white space at its end.

    Decoding may add a token before the prompt, and truncation may remove the beginning of a long prompt; then the end
    of the prompt is searched. A query without the prompt is all response.
    """
    return drop_end_of_text(query[_end_of_prompt(query, prompt) :])


def _end_of_prompt(query: str, prompt: str) -> int:
    if query.startswith(prompt):
        return len(prompt)
    if (found := query.find(prompt)) >= 0:
        return found + len(prompt)
    cut = -1
    for _ in range(_MAX_CUTS):
        cut = prompt.find(query[:_TAIL_CHARS], cut + 1)
        if cut < 0:
            break
        if query.startswith(prompt[cut:]):
            return len(prompt) - cut
    tail = prompt[-_TAIL_CHARS:]
    found = query.find(tail)
    return found + len(tail) if found >= 0 else 0
