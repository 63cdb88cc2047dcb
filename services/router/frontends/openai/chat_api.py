"""Answers the requests of OpenAI's clients from the policy."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.responses import Response

from penstock.bus.recordings import Recordings
from penstock.config import SamplingConfig
from penstock.errors import InvalidRequestError, PenstockError
from penstock.model.chat.chat_template import Renderer
from penstock.model.chat.reasoning import ReasoningReader, ThoughtSplitter
from penstock.model.chat.tool_calls import ToolCallReader
from penstock.model.detokenize import IncrementalDetokenizer
from services.router.config import OpenAIConfig
from services.router.forwarder import RequestForwarder
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.errors import ParameterError, UnknownModelError
from services.router.frontends.openai.event_stream import EventStream, SendEvent, encode_event
from services.router.frontends.openai.generation import Terms, generating
from services.router.frontends.openai.parsed_request import ParsedRequest
from services.router.frontends.openai.parsing.text_sizes import size_of_completion, size_to_parse
from services.router.frontends.openai.parsing_threads import ParsingThreads
from services.router.frontends.openai.recording import page_json, record
from services.router.frontends.openai.request_parser import RequestParser, name_session
from services.router.frontends.openai.responses import ChatFormat, CompletionFormat, ResponseFormat
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.router.frontends.openai.schema.tokens import DetokenizeRequest, TokenizeRequest
from services.router.frontends.openai.whole_answer import WholeAnswer
from services.router.tuning import OpenAITuning

Keep: TypeAlias = Callable[[Sequence[Choice]], Awaitable[None]]
"""Records the choices of an answer."""

AnswerT = TypeVar("AnswerT")

_USUAL = Terms()
_CHUNK_TOKENS = 64
"""Tokens per chunk of answers that are only sent once complete."""


class ChatApi:
    """One served policy. Close it after use."""

    def __init__(
        self,
        tuning: OpenAITuning,
        sampling: SamplingConfig,
        config: OpenAIConfig,
        *,
        model: str,
        renderers: Sequence[Renderer],
        forwarder: RequestForwarder,
        recordings: Recordings,
    ) -> None:
        """Serve the policy as `model`.

        Args:
            tuning: Bounds and times.
            sampling: Defaults of requests.
            config: Settings.
            model: The name.
            renderers: `NUM_THREADS` copies of the model's template and tokenizer.
            forwarder: Reaches the engines.
            recordings: Keeps recorded calls.

        Raises:
            ConfigError: the tokenizer's text cannot be streamed.
        """
        self.model = model
        self.created = int(time.time())
        self._tuning = tuning
        self._forwarder = forwarder
        self._recordings = recordings
        self._texts = renderers[0].token_texts()
        self._parsing = ParsingThreads(
            [
                RequestParser(
                    tuning,
                    sampling,
                    renderer,
                    longest_token_bytes=self._texts.longest_bytes,
                    context_length=lambda: forwarder.context_length,
                    default_max_tokens=config.default_max_tokens,
                    separates_reasoning=config.separate_reasoning,
                )
                for renderer in renderers
            ]
        )

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer together, as `RequestForwarder.context_length`."""
        return self._forwarder.context_length

    def describe(self) -> dict[str, Any]:
        """Describe the policy for lists of models."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "penstock",
            "max_model_len": self.context_length,
        }

    async def parse(self, parse: Callable[[RequestParser], ParsedRequest], *, size_bytes: int) -> ParsedRequest:
        """Run `parse` on a text of `size_bytes`, in a thread that may take its time, and return its result."""
        return await self._parsing.run(parse, size_bytes=size_bytes)

    def close(self) -> None:
        """End the threads that parse requests."""
        self._parsing.close()

    async def chat(self, body: ChatRequest, *, session: str, recorded_session: str) -> Response:
        """Answer /v1/chat/completions; `session` and `recorded_session` come from headers."""
        self._require_model(body)
        session_id, is_recorded = _find_session(body, session=session, recorded_session=recorded_session)
        request = await self.parse(
            lambda parser: parser.parse_chat(body, session_id=session_id, is_recorded=is_recorded),
            size_bytes=size_to_parse(body),
        )
        return await self.answer(request, ChatFormat, is_streamed=body.stream)

    async def complete(self, body: CompletionRequest, *, session: str, recorded_session: str) -> Response:
        """Answer /v1/completions."""
        self._require_model(body)
        session_id, is_recorded = _find_session(body, session=session, recorded_session=recorded_session)
        request = await self.parse(
            lambda parser: parser.parse_completion(body, session_id=session_id, is_recorded=is_recorded),
            size_bytes=size_of_completion(body),
        )
        return await self.answer(request, CompletionFormat, is_streamed=body.stream)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Answer /tokenize with the ids that a call with this prompt would have."""
        self.find_model(body.model or self.model)
        if body.prompt is not None:
            call = CompletionRequest(model=self.model, prompt=body.prompt)
            size_bytes = size_of_completion(call)
            request = await self._parsing.run(
                lambda parser: parser.parse_completion(call, session_id="", is_recorded=False), size_bytes=size_bytes
            )
        else:
            chat = ChatRequest(
                model=self.model,
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            request = await self._parsing.run(
                lambda parser: parser.parse_chat(chat, session_id="", is_recorded=False), size_bytes=size_to_parse(chat)
            )
        ids = list(request.prompts[0].input_ids)
        names = [self._texts.name_of(number) for number in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.context_length, "tokens": ids, "token_strs": names}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Answer /detokenize with the ids' text, special tokens included, under vLLM's name and SGLang's."""
        self.find_model(body.model or self.model)
        text = await asyncio.to_thread(self._text_of, body.tokens)  # as many as a body may have
        return {"prompt": text, "text": text}

    def _text_of(self, ids: Sequence[int]) -> str:
        stream = IncrementalDetokenizer(self._texts)
        text = "".join(
            stream.add(number) if self._texts.bytes_of(number) else self._texts.name_of(number) for number in ids
        )
        return text + stream.finish()

    async def recorded(self, session: str, *, after: int, limit: int) -> bytes:
        """Return a page of the session's recorded calls as JSON, oldest first."""
        page = await self._recordings.read(session, after=after, limit=limit)
        return await asyncio.to_thread(page_json, page)

    async def forget(self, session: str) -> None:
        """Remove the session's recorded calls."""
        await self._recordings.remove(session)

    def find_model(self, name: str) -> None:
        """Check that the policy is served under this name.

        Raises:
            UnknownModelError: it is not.
        """
        if name != self.model:
            raise UnknownModelError("model", f"model = {name!r} is not served here; {self.model!r} is")

    def _require_model(self, body: GenerationRequest) -> None:
        if body.model != self.model:
            raise UnknownModelError(
                "model", f"model = {body.model!r} is not served here; send {self.model!r}, as /v1/models says"
            )

    async def answer(
        self,
        request: ParsedRequest,
        make_format: type[ResponseFormat],
        *,
        is_streamed: bool,
        keep: Keep | None = None,
        terms: Terms = _USUAL,
    ) -> Response:
        """Return the response that answers a parsed request, and generates the answer when it is sent.

        For the client, the answer ends once `keep` has recorded its choices.

        Args:
            request: What to generate.
            make_format: The format of the answer.
            is_streamed: Whether to send it as events.
            keep: Records whole choices; None: as recorded calls, if the request asks for it.
            terms: Special conditions of the answer.
        """
        keep = keep or functools.partial(self._record, request)
        choices = [self._make_choice(request) for _ in range(request.num_all)]
        form = make_format(request, choices, self._texts, model=self.model)
        if is_streamed:
            return EventStream(
                lambda send: _noted(self._stream(request, choices, form, keep, terms, send), choices, terms),
                lambda: form.headers,
            )
        return WholeAnswer(lambda: _noted(self._finish(request, choices, form, keep, terms), choices, terms))

    async def _finish(
        self, request: ParsedRequest, choices: list[Choice], form: ResponseFormat, keep: Keep, terms: Terms
    ) -> Response:
        """Generate the answer and return it once the call is recorded."""
        chunk_tokens = 0 if request.is_cut_by_text else _CHUNK_TOKENS
        async with generating(
            self._forwarder,
            request,
            choices,
            terms,
            timeout_s=self._timeout_s(terms),
            chunk_tokens=chunk_tokens,
            is_streamed=False,
        ) as deltas:
            async for _, delta in deltas:
                form.take(delta)
        await keep(choices)
        content = await asyncio.to_thread(lambda: msgspec.json.encode(form.whole()))  # log-probabilities take seconds
        return Response(content, media_type="application/json", headers=form.headers)

    def _timeout_s(self, terms: Terms) -> float:
        return max(self._tuning.timeout_s, terms.timeout_s)

    def _make_choice(self, request: ParsedRequest) -> Choice:
        reader = ReasoningReader if request.separates_reasoning else ThoughtSplitter if request.reads_tools else None
        return Choice(
            self._texts,
            stops=request.stops,
            includes_stop=request.includes_stop,
            calls=ToolCallReader(request.call_format, request.tools) if request.reads_tools else None,
            has_one_call=request.has_one_call,
            begun_call=request.begun_call,
            thoughts=None if reader is None else reader(is_open=request.thinks),
            separates_reasoning=request.separates_reasoning,
            has_tokens=request.has_tokens,
        )

    async def _stream(
        self,
        request: ParsedRequest,
        choices: list[Choice],
        form: ResponseFormat,
        keep: Keep,
        terms: Terms,
        send: SendEvent,
    ) -> None:
        """Send the answer while it is generated; the last choice's end is sent once the call is recorded."""
        opened: set[int] = set()
        num_left = len(choices)
        async with generating(
            self._forwarder,
            request,
            choices,
            terms,
            timeout_s=self._timeout_s(terms),
            chunk_tokens=0,
            is_streamed=True,
        ) as deltas:
            async for index, delta in deltas:
                form.take(delta)
                if index not in opened and (opening := await _open(form, index, request)):
                    await send(opening)
                opened.add(index)
                if event := form.delta(index, delta):
                    await send(encode_event(event))
                num_left -= delta.is_last
                if delta.is_last and num_left:
                    await send(encode_event(form.closing(index, is_last=False)))
        await keep(choices)
        await send(encode_event(form.closing(index, is_last=True)))
        if request.shows_usage:
            await send(encode_event(form.usage()))

    async def _record(self, request: ParsedRequest, choices: Sequence[Choice]) -> None:
        if not request.is_recorded:
            return
        try:
            await record(self._recordings, request, choices)
        except InvalidRequestError as error:
            raise ParameterError("record", str(error)) from None


async def _noted(answering: Awaitable[AnswerT], choices: Sequence[Choice], terms: Terms) -> AnswerT:
    """Return the answer; have `terms` note the error that ends it instead, with what has come of its choices."""
    try:
        return await answering
    except PenstockError as error:
        if terms.note_failure is not None:
            await terms.note_failure(error, choices)
        raise


async def _open(form: ResponseFormat, index: int, request: ParsedRequest) -> bytes | None:
    """Return the encoded event before a choice's first delta, written in a thread if it takes long; None: none."""

    def write() -> bytes | None:
        event = form.opening(index)
        return encode_event(event) if event else None

    return await asyncio.to_thread(write) if request.opens_with_prompt else write()


def _find_session(body: GenerationRequest, *, session: str, recorded_session: str) -> tuple[str, bool]:
    """Return the session of a request, and whether to record the call under it."""
    session_id = name_session(
        header=recorded_session or session, metadata=body.metadata.get("session_id", ""), user=body.user
    )
    is_recorded = body.record or bool(recorded_session)
    if is_recorded and not session_id:
        raise ParameterError("record", "record needs a session; send the header x-session-id, or user")
    return session_id, is_recorded
