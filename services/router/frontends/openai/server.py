"""Life of the OpenAI-compatible frontend beside a router."""

import asyncio
import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.bus.recordings import Recordings
from penstock.bus.sessions import Sessions
from penstock.config import SamplingConfig
from penstock.http.server import HttpServer
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.tokens import image_token_id
from penstock.runtime.security import Security
from services.router.config import RouterConfig
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.app import make_openai_app
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.errors import error_body
from services.router.frontends.openai.parsing_threads import NUM_THREADS
from services.router.frontends.openai.sessions.routes import noting_large_bodies, session_of
from services.router.frontends.openai.sessions.session_api import SessionApi
from services.router.tuning import OpenAITuning

_BODY_WAIT_S = 60.0
"""Seconds that a large body waits for room: agents take a refusal as their own failure. Others make room within
seconds, because they are only parsed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatBackend:
    """The policy's model, name and defaults, which a router needs to serve text."""

    model: str
    """Name under which it is served."""
    renderer: Renderer
    sampling: SamplingConfig
    """Defaults of requests."""
    grid: ImageGrid | None = None
    """How the model cuts images into tokens; None for a model without images."""

    @classmethod
    def load(cls, config: RouterConfig, *, run: str, model_path: Path, sampling: SamplingConfig) -> Self:
        """Read the model's tokenizer and template.

        Raises:
            ConfigError: the folder has no usable tokenizer or template.
        """
        return cls(
            model=config.openai.model or run,
            renderer=Renderer.load(model_path),
            sampling=sampling,
            grid=None if image_token_id(model_path) is None else ImageGrid.of(model_path),
        )

    def renderers(self) -> Sequence[Renderer]:
        """Return one renderer for each parsing thread. Copying takes a second for a large vocabulary."""
        return [self.renderer, *(copy.deepcopy(self.renderer) for _ in range(NUM_THREADS - 1))]


@asynccontextmanager
async def serving(
    config: RouterConfig,
    bus: Bus,
    forwarder: RequestForwarder,
    backend: ChatBackend,
    security: Security,
    *,
    host: str,
    tuning: OpenAITuning,
) -> AsyncIterator[HttpServer]:
    """Serve HTTP during the context; the caller drains it before it leaves.

    Raises:
        SetupError: the port is in use, or NATS does not create the stream of recorded calls.
    """
    recordings, sessions = Recordings(bus), Sessions(bus)
    images = ImageStore(bus, cache_bytes=0)  # engines read them, this process never
    await sessions.ensure()
    await images.ensure()
    await recordings.ensure(max_age_s=tuning.recordings_max_age_s, max_bytes=config.openai.recordings_max_mb * 2**20)
    api = ChatApi(
        tuning,
        backend.sampling,
        config.openai,
        model=backend.model,
        renderers=await asyncio.to_thread(backend.renderers),
        forwarder=forwarder,
        recordings=recordings,
    )
    session_api = SessionApi(api, sessions, images, grid=backend.grid)
    server = HttpServer(
        make_openai_app(api, session_api),
        host=host,
        port=config.http_port or 0,
        key="router.http_port",
        max_body_bytes=tuning.max_body_bytes,
        body_wait_s=_BODY_WAIT_S,
        make_error_body=error_body,
        security=security,
        name_of_key=session_of,
        wrap=functools.partial(noting_large_bodies, sessions=session_api),
    )
    try:
        await server.start()
        yield server
    finally:
        api.close()
