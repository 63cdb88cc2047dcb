"""All pages of the OpenAI-compatible face."""

import importlib.metadata
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.http.app import describe, make_app
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.errors import body_of, error_body, error_response, status_for
from services.router.frontends.openai.schemas import ChatRequest, CompletionRequest

_DESCRIPTION = """
Talk to the policy that is being trained, as to any OpenAI-compatible server. Each answer tells which policy version
made which of its tokens, and can be recorded with ids and logprobs to be trained on.
"""

_Session = Annotated[str, Header(description="Names the session: its calls go to one replica.")]
_Recorded = Annotated[str, Header(description="Names the session, and records the call under it.")]


def make_openai_app(face: ChatApi) -> FastAPI:
    """The application."""
    version = importlib.metadata.version("penstock")
    app = make_app(title="Penstock policy", description=_DESCRIPTION, version=version)
    for kind in (PenstockError, TimeoutError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)

    @app.post("/v1/chat/completions", tags=["policy"], response_class=Response)
    async def chat(body: ChatRequest, x_session_id: _Session = "", x_penstock_record: _Recorded = "") -> Response:
        """ResumableStream a conversation."""
        return await face.chat(body, session=x_session_id, recorded_session=x_penstock_record)

    @app.post("/v1/completions", tags=["policy"], response_class=Response)
    async def complete(
        body: CompletionRequest, x_session_id: _Session = "", x_penstock_record: _Recorded = ""
    ) -> Response:
        """Go on with a text, or with token ids."""
        return await face.complete(body, session=x_session_id, recorded_session=x_penstock_record)

    @app.get("/v1/models", tags=["policy"])
    async def list_models() -> dict[str, Any]:
        """Tell of the served policy."""
        return {"object": "list", "data": [_model(face)]}

    @app.get("/v1/models/{model}", tags=["policy"])
    async def find_model(model: str) -> dict[str, Any]:
        """Tell of the served policy by its name."""
        if model != face.model:
            raise HTTPException(404, f"model = {model!r} is not served here; {face.model!r} is")
        return _model(face)

    @app.get("/v1/penstock/recordings/{session:path}", tags=["recordings"])
    async def recorded(
        session: str,
        after: Annotated[int, Query(ge=0, lt=2**63, description="Only calls with a higher number.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JSONResponse:
        """Give recorded calls of a session back, oldest first."""
        return JSONResponse(await face.recorded(session, after=after, limit=limit))

    @app.delete("/v1/penstock/recordings/{session:path}", tags=["recordings"])
    async def forget(session: str) -> dict[str, str]:
        """Remove the recorded calls of a session."""
        await face.forget(session)
        return {"session_id": session}

    @app.get("/healthz", tags=["operation"])
    async def healthz() -> dict[str, str]:
        """200 while the router takes calls; 503 while it stops."""
        return {"status": "serving"}

    return app


def _model(face: ChatApi) -> dict[str, Any]:
    return {"id": face.model, "object": "model", "created": face.created, "owned_by": "penstock"}


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_response(status_for(error), body_of(error))


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error_body(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _answer_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "unsupported":
        param = ".".join(filter(None, (param, first["ctx"]["name"])))
        message = f"{param} {first['msg']}"
    else:
        message = describe([first])
    return error_response(400, error_body(400, message, param=param or None))
