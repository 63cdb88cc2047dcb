"""The routes of agents' sessions: /sessions/{id}/v1, a base URL for each session."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions.session_api import SessionApi

PREFIX = "/sessions/"


def session_of(path: str) -> str:
    """Return the session in a request's path; empty if the path is not a session's."""
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
