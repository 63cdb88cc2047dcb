"""The frontend for slime: `--rm-type remote_rm --rm-url http://HOST:PORT`.

slime posts {"prompt", "response", "label"} for each sample, tries ten times on a status other than 2xx, then raises,
and takes the whole JSON body as the reward (slime/rollout/rm_hub/__init__.py, `remote_rm`). So an unverifiable sample
is answered with 200 and 0.0, and the header X-Penstock-Status gives the reason.
"""

import functools
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from penstock.errors import InvalidRequestError
from penstock.http.app import ErrorBody
from penstock.http.body_parsing import parse_body
from penstock.http.json_body import parse_json
from penstock.verdict_status import UNJUDGED
from services.reward.config import RewardConfig
from services.reward.frontends.http.label import golds_of, text_of
from services.reward.item import Item
from services.reward.profiles.registry import find_profile
from services.reward.verifier import Verifier

log = structlog.get_logger()

STATUS_HEADER = "X-Penstock-Status"
ERROR_HEADER = "X-Penstock-Error"
_INVALID = "INVALID_REQUEST"
_MAX_HEADER_CHARS = 200

_OPENAPI = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": {"description": "prompt, response and label; label: a string, a number or a list of strings"},
                "example": {"prompt": "What is 2+3?", "response": "It is \\boxed{5}", "label": "5"},
            }
        }
    }
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The reward.",
        "content": {"application/json": {"schema": {"type": "number"}}},
        "headers": {
            STATUS_HEADER: {
                "description": f"The verdict's status, or {_INVALID} for a body without a sample.",
                "schema": {"type": "string"},
            },
            ERROR_HEADER: {"description": f"With {_INVALID}: what is wrong.", "schema": {"type": "string"}},
        },
    },
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "There is no such profile."},
    429: {"model": ErrorBody, "description": "The room for bodies is full; try again later."},
    503: {"model": ErrorBody, "description": "The service is stopping."},
}


def add_routes(app: FastAPI, verifier: Verifier, config: RewardConfig) -> None:
    """Add / and /slime."""

    async def remote_rm(request: Request, profile: str = config.http_profile) -> JSONResponse:
        """Verify one sample for slime's `remote_rm`: the answer is the reward, a bare number."""
        find_profile(verifier.profiles, profile)
        try:
            item = await parse_body(request, functools.partial(_item, profile=profile))
        except InvalidRequestError as error:
            log.warning("sample.refused", frontend="slime", reason=str(error))
            reason = str(error)[:_MAX_HEADER_CHARS].encode("ascii", "replace").decode()
            reason = "".join(character if character.isprintable() else " " for character in reason)
            return JSONResponse(0.0, headers={STATUS_HEADER: _INVALID, ERROR_HEADER: reason})
        (verdict,) = await verifier.verify_when_free([item])
        status = verdict.finding.status
        return JSONResponse(0.0 if status in UNJUDGED else verdict.score, headers={STATUS_HEADER: status})

    for path in ("/", "/slime"):
        app.post(path, tags=["slime"], response_model=None, responses=_RESPONSES, openapi_extra=_OPENAPI)(remote_rm)


def _item(body: bytes, profile: str) -> Item:
    sample = parse_json(body, numbers_as_text=True)
    if not isinstance(sample, dict):
        raise InvalidRequestError("the body is not a JSON object; send prompt, response and label")
    response = sample.get("response")
    if not isinstance(response, str):
        raise InvalidRequestError("response is missing or not a string")
    if "label" not in sample:
        raise InvalidRequestError("label is missing; set --label-key to the dataset's column of answers")
    return Item(
        golds=golds_of(sample["label"], field="label"),
        response=response,
        profile=profile,
        prompt=text_of(sample.get("prompt")),
    )
