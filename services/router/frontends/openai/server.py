"""The life of the OpenAI-compatible face beside a router."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from penstock.bus.connection import Bus
from penstock.bus.recordings import Recordings
from penstock.config import SamplingConfig
from penstock.http.server import HttpServer
from penstock.model.chat_template import Renderer
from penstock.runtime.security import Security
from services.router.config import RouterConfig
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.app import make_openai_app
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.errors import error_body


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatBackend:
    """What a router must know of the policy to speak text."""

    model: str
    """Name under which it is served."""
    renderer: Renderer
    sampling: SamplingConfig
    """What holds where a request does not say."""

    @classmethod
    def load(cls, config: RouterConfig, *, run: str, model_path: Path, sampling: SamplingConfig) -> Self:
        """Read the model's tokenizer and template.

        Raises:
            ConfigError: the folder has none that could be used.
        """
        return cls(model=config.openai.model or run, renderer=Renderer.load(model_path), sampling=sampling)


@asynccontextmanager
async def serving(
    config: RouterConfig, bus: Bus, player: RequestForwarder, voice: ChatBackend, security: Security
) -> AsyncIterator[HttpServer]:
    """Serve HTTP during the context; it drains at the end.

    Raises:
        SetupError: the port is in use, or NATS does not make the stream of recorded calls.
    """
    settings = config.openai
    recordings = Recordings(bus)
    await recordings.ensure(max_age_s=settings.recordings_max_age_s, max_bytes=settings.recordings_max_mb * 2**20)
    face = ChatApi(
        settings,
        voice.sampling,
        model=voice.model,
        renderer=voice.renderer,
        player=player,
        recordings=recordings,
    )
    server = HttpServer(
        make_openai_app(face),
        host=config.host,
        port=config.http_port or 0,
        max_body_bytes=settings.max_body_mb * 2**20,
        make_error_body=error_body,
        security=security,
    )
    try:
        await server.start()
        try:
            yield server
        finally:
            await server.drain(config.grace_s)
    finally:
        face.close()
