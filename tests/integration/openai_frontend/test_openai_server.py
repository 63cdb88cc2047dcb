"""The OpenAI-compatible frontend's life beside a router."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore, hash_of
from penstock.config import SamplingConfig
from penstock.errors import MissingImageError
from penstock.model.chat.chat_template import Renderer
from penstock.runtime.security import Security
from services.router.config import RouterConfig
from services.router.frontends.openai import server
from services.router.tuning import OpenAITuning
from tests.support.router.openai_harness import PNG


async def test_images_of_sessions_are_not_kept_in_the_router(
    monkeypatch: pytest.MonkeyPatch, bus: Bus, renderer: Renderer
) -> None:
    """It stores them, and never reads one."""
    stores: list[ImageStore] = []

    def make(*arguments: Any, **options: Any) -> ImageStore:
        stores.append(ImageStore(*arguments, **options))
        return stores[-1]

    monkeypatch.setattr(server, "ImageStore", make)
    backend = server.ChatBackend(model="m", renderer=renderer, sampling=SamplingConfig())
    forwarder: Any = SimpleNamespace(context_length=None)
    async with server.serving(
        RouterConfig(http_port=0), bus, forwarder, backend, Security(), host="127.0.0.1", tuning=OpenAITuning()
    ) as http:
        await http.drain(0.0)
        [images] = stores
        assert await images.put("scope", PNG) == hash_of(PNG)
        await images.remove("scope")
        with pytest.raises(MissingImageError):
            await images.get("scope", hash_of(PNG))
