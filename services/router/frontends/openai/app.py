"""The routes of the OpenAI-compatible frontend."""

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.errors import PenstockError, SessionOverError
from penstock.http.app import describe, make_app
from penstock.records.session import SESSION_HEADER
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.errors import ParameterError, body_of, error_body, error_response, status_for
from services.router.frontends.openai.schema.base import PARAMETER_FAULT
from services.router.frontends.openai.schema.constraint import FORMAT_TYPES
from services.router.frontends.openai.schema.messages import PART_TYPES, TOOL_CHOICE_TAGS
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest
from services.router.frontends.openai.schema.tokens import DetokenizeRequest, TokenizeRequest
from services.router.frontends.openai.sessions.routes import CHAT_PATH, add_session_routes, session_of
from services.router.frontends.openai.sessions.session_api import SessionApi

_DESCRIPTION = """
Talk to the policy that is being trained, as to any OpenAI-compatible server. Each answer says which policy version
made which of its tokens, and can be recorded with ids and logprobs to be trained on.
"""

_Session = Annotated[str, Header(description="Names the session: its calls go to one replica.")]
_AgentSession = Annotated[
    str, Header(alias=SESSION_HEADER, description="An agent's session, in place of its base URL /sessions/{id}/v1.")
]
_NoSession = Annotated[
    str, Header(alias=SESSION_HEADER, description="Refused: an agent's session has no raw completions.")
]
_Recorded = Annotated[str, Header(description="Names the session, and records the call under it.")]


def make_openai_app(api: ChatApi, sessions: SessionApi) -> FastAPI:
    """Build the application."""
    version = importlib.metadata.version("penstock")
    app = make_app(title="Penstock policy", description=_DESCRIPTION, version=version)
    for kind in (PenstockError, TimeoutError, Exception):
        app.add_exception_handler(kind, _answer_error)

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # the body cannot be read
            await sessions.note_refusal(session_of(request.scope), str(error.detail))
        response = error_response(error.status_code, error_body(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    async def answer_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = _describe(error)
        await sessions.note_refusal(session_of(request.scope), message)
        return error_response(400, error_body(400, message, param=param or None))

    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)

    @app.post(CHAT_PATH, tags=["policy"], response_class=Response)
    async def chat(
        body: ChatRequest,
        x_session_id: _Session = "",
        x_penstock_record: _Recorded = "",
        agent_session: _AgentSession = "",
    ) -> Response:
        """Answer a conversation."""
        if agent_session:
            return await sessions.answer(agent_session, body)
        return await api.chat(body, session=x_session_id, recorded_session=x_penstock_record)

    @app.post("/v1/completions", tags=["policy"], response_class=Response)
    async def complete(
        body: CompletionRequest,
        x_session_id: _Session = "",
        x_penstock_record: _Recorded = "",
        agent_session: _NoSession = "",
    ) -> Response:
        """Continue a text, or token ids."""
        if agent_session:
            raise ParameterError(
                SESSION_HEADER,
                f"{SESSION_HEADER}: raw completions have no sessions; ask {CHAT_PATH}, or leave the header out",
            )
        return await api.complete(body, session=x_session_id, recorded_session=x_penstock_record)

    @app.get("/v1/models", tags=["policy"])
    async def list_models() -> dict[str, Any]:
        """List the served policy."""
        return {"object": "list", "data": [api.describe()]}

    @app.get("/v1/models/{model:path}", tags=["policy"])
    async def find_model(model: str) -> dict[str, Any]:
        """Describe the served policy by its name."""
        api.find_model(model)
        return api.describe()

    @app.post("/tokenize", tags=["policy"])
    @app.post("/v1/tokenize", tags=["policy"], name="tokenize_v1")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Return the ids of a text or a conversation."""
        return await api.tokenize(body)

    @app.post("/detokenize", tags=["policy"])
    @app.post("/v1/detokenize", tags=["policy"], name="detokenize_v1")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Return the text of ids."""
        return await api.detokenize(body)

    @app.get("/v1/penstock/recordings/{session:path}", tags=["recordings"], response_class=Response)
    async def recorded(
        session: str,
        after: Annotated[int, Query(ge=0, lt=2**63, description="Only calls with a higher number.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Return a page of a session's recorded calls, oldest first, of at most about 16 MiB."""
        return Response(await api.recorded(session, after=after, limit=limit), media_type="application/json")

    @app.delete("/v1/penstock/recordings/{session:path}", tags=["recordings"])
    async def forget(session: str) -> dict[str, str]:
        """Remove the recorded calls of a session."""
        await api.forget(session)
        return {"session_id": session}

    add_session_routes(app, api, sessions)

    @app.get("/healthz", tags=["operation"])
    @app.get("/health", tags=["operation"], name="health")
    @app.get("/ping", tags=["operation"], name="ping")
    async def healthz() -> dict[str, str]:
        """Return 200 while the router takes calls; 503 while it stops."""
        return {"status": "serving"}

    @app.get("/version", tags=["operation"])
    async def show_version() -> dict[str, str]:
        """Return the version of Penstock."""
        return {"version": version}

    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    response = error_response(status_for(error), body_of(error))
    if isinstance(error, SessionOverError):
        response.headers["x-should-retry"] = "false"  # otherwise OpenAI's clients repeat calls that get 409
    return response


def _describe(error: RequestValidationError) -> tuple[str, str]:
    """Return the parameter that is wrong, empty for the whole body, and what is wrong with it."""
    first = dict(error.errors()[0])
    first["loc"] = _location(first["loc"])
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] != PARAMETER_FAULT:
        return param, describe([first])
    param = ".".join(filter(None, (param, first["ctx"]["name"])))
    return param, f"{param} {first['msg']}"


def _location(parts: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return where in the request the error is: pydantic's location without the tags that it adds for unions. These are
    the kind of content after `content`, the kind of part after a part's index, the kind of prompt after `prompt`, and
    the form of a `tool_choice` or a `response_format`."""
    kept = []
    for before, after, part in zip([None, None, *parts], [None, *parts], parts, strict=False):
        is_tag = (
            (after == "content" and part in ("text", "parts"))
            or (before == "parts" and part in PART_TYPES)
            or (after == "prompt" and isinstance(part, str))
            or (after == "tool_choice" and part in TOOL_CHOICE_TAGS)
            or (after == "response_format" and part in FORMAT_TYPES)
        )
        if part != "body" and not is_tag:
            kept.append(part)
    return tuple(kept)
