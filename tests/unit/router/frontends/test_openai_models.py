"""The routes that describe the served policy."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.router.frontends.openai.app import make_openai_app
from services.router.frontends.openai.chat_api import ChatApi


@pytest.mark.parametrize("name", ["policy", "Qwen/Qwen3-0.6B"])
async def test_the_policy_is_found_by_its_name(name: str) -> None:
    """Names on the Hugging Face Hub have a slash, which clients may send as it is or escaped."""
    api = ChatApi.__new__(ChatApi)
    forwarder: Any = SimpleNamespace(context_length=None)
    api.model, api.created, api._forwarder = name, 1, forwarder
    sessions: Any = None
    transport = httpx.ASGITransport(make_openai_app(api, sessions))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for written in (name, name.replace("/", "%2F")):
            answer = await client.get(f"/v1/models/{written}")
            assert (answer.status_code, answer.json().get("id")) == (200, name)
        assert (await client.get("/v1/models/other")).status_code == 404
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == [name]
