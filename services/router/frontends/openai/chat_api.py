"""Answers requests of OpenAI's clients with what the policy says."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.bus.recordings import Recordings
from penstock.config import SamplingConfig
from penstock.errors import InvalidRequestError
from penstock.model.chat_template import Renderer
from services.router.config import OpenAIConfig
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.errors import ParameterError, UnknownModelError
from services.router.frontends.openai.event_stream import EventStream, Tell
from services.router.frontends.openai.generation import playing
from services.router.frontends.openai.parsed_request import Asked, Reader, name_session
from services.router.frontends.openai.recording import call_json, record
from services.router.frontends.openai.responses import ChatForm, CompletionForm, Form
from services.router.frontends.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest

_CHUNK_TOKENS = 64
"""Of answers that nobody reads before they are whole."""


class ChatApi:
    """One served policy. Close it."""

    def __init__(
        self,
        config: OpenAIConfig,
        sampling: SamplingConfig,
        *,
        model: str,
        renderer: Renderer,
        player: RequestForwarder,
        recordings: Recordings,
    ) -> None:
        """Serve the policy as `model`.

        Raises:
            ConfigError: the renderer's tokenizer is of a kind whose text cannot be streamed.
        """
        self.model = model
        self.created = int(time.time())
        self._config = config
        self._player = player
        self._recordings = recordings
        self._reader = Reader(config, sampling, renderer)
        self._texts = renderer.token_texts()
        # Templates and tokenizers take milliseconds of every long prompt, which other calls need not wait for.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="render")

    def close(self) -> None:
        """End the thread that reads requests."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: ChatRequest, *, session: str, recorded_session: str) -> Response:
        """ResumableStream /v1/chat/completions; `session` and `recorded_session` are what headers say."""
        return await self._answer(body, self._reader.read_chat, ChatForm, session, recorded_session)

    async def complete(self, body: CompletionRequest, *, session: str, recorded_session: str) -> Response:
        """ResumableStream /v1/completions."""
        return await self._answer(body, self._reader.read_completion, CompletionForm, session, recorded_session)

    async def recorded(self, session: str, *, after: int, limit: int) -> dict[str, Any]:
        """The session's recorded calls, oldest first."""
        calls = await self._recordings.read(session, after=after, limit=limit)
        return {"object": "list", "data": [call_json(number, call) for number, call in calls]}

    async def forget(self, session: str) -> None:
        """Remove the session's recorded calls."""
        await self._recordings.remove(session)

    async def _answer(
        self,
        body: GenerationRequest,
        read: Callable[..., Asked],
        make_form: type[Form],
        session: str,
        recorded_session: str,
    ) -> Response:
        if body.model != self.model:
            raise UnknownModelError(
                "model", f"model = {body.model!r} is not served here; send {self.model!r}, as /v1/models says"
            )
        session_id = name_session(
            header=recorded_session or session, metadata=body.metadata.get("session_id", ""), user=body.user
        )
        is_recorded = body.record or bool(recorded_session)
        if is_recorded and not session_id:
            raise ParameterError("record", "record needs a session; send the header x-session-id, or user")
        asked = await asyncio.get_running_loop().run_in_executor(
            self._reading, lambda: read(body, session_id=session_id, is_recorded=is_recorded)
        )
        choices = [Choice(self._texts, stops=asked.stops, reads_tools=asked.reads_tools) for _ in range(asked.num_all)]
        form = make_form(asked, choices, self._texts, model=self.model)
        if body.stream:
            return EventStream(lambda tell: self._narrate(asked, choices, form, tell), lambda: form.headers)
        chunk_tokens = 0 if asked.stops else _CHUNK_TOKENS
        async with playing(
            self._player, asked, choices, timeout_s=self._config.timeout_s, chunk_tokens=chunk_tokens
        ) as pieces:
            async for _ in pieces:
                pass
        await self._keep(asked, choices)
        return JSONResponse(form.whole(), headers=form.headers)

    async def _narrate(self, asked: Asked, choices: list[Choice], form: Form, tell: Tell) -> None:
        """Tell of the answer while it comes; how the last choice ended is told when the call is recorded."""
        opened: set[int] = set()
        num_left = len(choices)
        async with playing(self._player, asked, choices, timeout_s=self._config.timeout_s, chunk_tokens=0) as pieces:
            async for index, piece in pieces:
                if index not in opened and (event := form.opening(index)):
                    await tell(event)
                opened.add(index)
                if event := form.piece(index, piece):
                    await tell(event)
                num_left -= piece.is_last
                if piece.is_last and num_left:
                    await tell(form.closing(index, is_last=False))
        await self._keep(asked, choices)
        await tell(form.closing(index, is_last=True))
        if asked.shows_usage:
            await tell(form.usage())

    async def _keep(self, asked: Asked, choices: list[Choice]) -> None:
        if not asked.is_recorded:
            return
        try:
            await record(self._recordings, asked, choices)
        except InvalidRequestError as error:
            raise ParameterError("record", str(error)) from None
