"""The routes of agents' sessions: /sessions/{id}/v1, a base URL for each session.

A client whose base URL is fixed names its session in a header instead, at the chat route of all.
"""

import json
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.records.session import SESSION_HEADER
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions.session_api import SessionApi

PREFIX = "/sessions/"


CHAT_PATH = "/v1/chat/completions"
"""The one route outside of `PREFIX` that a session's key opens; others do not answer for a session."""


def session_of(request: Scope) -> str:
    """Return the session that a request's path or header names; empty if it is no session's."""
    path: str = request["path"]
    if path == CHAT_PATH:
        return Headers(scope=request).get(SESSION_HEADER, "")
    name, slash, _ = path.removeprefix(PREFIX).partition("/")
    return name if path.startswith(PREFIX) and slash else ""


def add_session_routes(app: FastAPI, api: ChatApi, sessions: SessionApi) -> None:
    """Add the routes to the application."""

    @app.post("/sessions/{session}/v1/chat/completions", tags=["sessions"], response_class=Response)
    async def chat(session: str, body: ChatRequest) -> Response:
        """Answer a conversation of an agent, and record the answer for training. `model` may be any name."""
        return await sessions.answer(session, body)

    @app.get("/sessions/{session}/v1/models", tags=["sessions"])
    async def list_models(session: str) -> dict[str, Any]:
        """List the served policy, while the session is open."""
        await sessions.require_open(session)
        return {"object": "list", "data": [api.describe()]}


def noting_large_bodies(server: ASGIApp, sessions: SessionApi) -> ASGIApp:
    """Return a server that notes in its session a body that was too large: no application sees that call."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status == 413 and message["type"] == "http.response.body":
                await sessions.note_refusal(session_of(scope), json.loads(message["body"])["error"]["message"])
            await send(message)

        await server(scope, receive, send_noted)

    return answer
