"""One call of an agent's session: the prompt that its messages make, and the records of its answers.

Invariant: the session, not the caller, decides how tokens are sampled.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pydantic

from penstock.bus.image_store import hash_of
from penstock.bus.sessions import OpenedSession
from penstock.http.app import describe
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Message, SessionCall, TextPart
from penstock.v1 import common_pb2
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.errors import ParameterError
from services.router.frontends.openai.parsed_request import ParsedRequest, PromptIds
from services.router.frontends.openai.parsing.constraint import read_constraint
from services.router.frontends.openai.request_parser import ReadChat, RequestParser
from services.router.frontends.openai.schema.messages import Tool, ToolFunction
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions.digests import digest_next
from services.router.frontends.openai.sessions.history import Chat, NextPrompt, SessionHistory
from services.router.frontends.openai.sessions.limits import room_for_answer

_TOOLS = pydantic.TypeAdapter(list[Tool])


class Call:
    """One call of a session: its prompt, and the record of its answers."""

    def __init__(self, opened: OpenedSession, history: SessionHistory, grid: ImageGrid | None, *, began: float) -> None:
        """Begin a call of `opened` after the answers in `history`; `grid` is how the model cuts images into tokens.

        The call came at `began`, a time of `time.monotonic()`.
        """
        self._id = opened.id
        self._began = began
        self._started_at = time.time() - (time.monotonic() - began)
        self._grid = grid
        self._state = opened.state
        self._history = history
        self.last_known = history.last_number
        """Number of the session's last answer when the call began."""
        self.images: Sequence[bytes] = ()
        self.hashes: Sequence[str] = ()
        """Content hashes of `images`."""
        self._prompt: NextPrompt | None = None

    @property
    def prompt(self) -> NextPrompt:
        """The prompt that the policy continues; only after `parse`."""
        assert self._prompt is not None
        return self._prompt

    def with_tools(self, body: ChatRequest) -> ChatRequest:
        """Return the request with the tools of the session's row, unless it brings its own."""
        if body.tools or not self._state.tools:
            return body
        return body.model_copy(update={"tools": _tools_of(self._state.tools)})

    def parse(self, parser: RequestParser, body: ChatRequest) -> ParsedRequest:
        """Return the request with the session's prompt and sampling."""
        state, forced = self._state, self._state.sampling
        given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        overridden = [name for name, value in given.items() if value not in (None, getattr(forced, name))]
        for name in ("continue_final_message", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise ParameterError(name, f"{name} is not supported in a session, whose prompts go on; leave it out")
        if read_constraint(body) is not None:
            name = "response_format" if body.structured_outputs is None else "structured_outputs"
            raise ParameterError(
                name, f"{name} is not supported in a session, where answers are drawn freely; leave it out"
            )
        changes: dict[str, object] = {name: getattr(forced, name) for name in given}
        changes["chat_template_kwargs"] = {**state.chat_template_kwargs, **body.chat_template_kwargs}
        parsed = parser.parse_chat(
            body.model_copy(update=changes),
            session_id=self._id.sample_key,
            is_recorded=forced.temperature > 0,
            compose=self._compose,
        )
        wanted = body.max_completion_tokens or body.max_tokens or forced.max_new_tokens
        images = dict(zip(self.hashes, self.images, strict=True))
        num_begun = self._num_begun(parsed)
        room = room_for_answer(self.prompt, state.limits, images, self._grid, num_begun=num_begun)
        bounds = (wanted, forced.max_new_tokens, room)
        parsed.sampling.max_new_tokens = min(bound for bound in bounds if bound is not None)
        return dataclasses.replace(
            parsed,
            is_recorded=True,
            ignored=[*parsed.ignored, *overridden],
            group_id=state.group,
            min_policy_version=state.min_version,
            exact_policy_version=state.exact_version or 0,
        )

    def record(self, request: ParsedRequest, index: int, choice: Choice) -> SessionCall:
        """Return the record of one answer, or of what has come of it when its session is ending."""
        prompt = self.prompt
        parts = (TextPart(text=choice.content),) if choice.content else ()
        answer = Message(role="assistant", parts=parts, tool_calls=tuple(choice.calls))
        return SessionCall(
            request_id=request.request_id,
            choice=index,
            continues=prompt.continues,
            conversation=digest_next(prompt.conversation, answer),
            answer=digest_next("", answer),
            input_ids=np.array(request.prompt_of(index).input_ids[prompt.num_prefix :], "<i4"),
            num_begun=self._num_begun(request),
            images=tuple(prompt.added_images),
            output_ids=np.array([token.number for token in choice.tokens], "<i4"),
            logprobs=np.array([token.logprob for token in choice.tokens], "<f4"),
            version_spans=choice.version_spans,
            finish_reason=choice.ending or "deadline",
            num_prompt_tokens=choice.num_prompt_tokens,
            num_cached_tokens=choice.num_cached_tokens,
            replica_id=choice.replica_id,
            started_at=self._started_at,
            waited_s=choice.began - self._began,
            generated_s=choice.ended - choice.began,
        )

    def _num_begun(self, request: ParsedRequest) -> int:
        """Return with how many tokens the router begins the answers: those after the prompt that was composed."""
        return len(request.prompts[0].input_ids) - len(self.prompt.input_ids)

    def _compose(self, renderer: Renderer, chat: ReadChat) -> PromptIds:
        self.images, self.hashes = chat.images, [hash_of(image) for image in chat.images]
        self._prompt = self._history.next_prompt(
            Chat(
                messages=chat.messages,
                images=self.hashes,
                tools=chat.tools,
                template_kwargs=chat.template_kwargs,
            ),
            renderer,
        )
        stored = [common_pb2.StoredImage(sha256=each, scope=self._state.scope) for each in self._prompt.images]
        return PromptIds(input_ids=self._prompt.input_ids, stored_images=stored)


def _tools_of(tools: Sequence[Mapping[str, object]]) -> list[Tool]:
    """Return the tools of a row, which may hold keys that no request may.

    Raises:
        ParameterError: one of them is wrong.
    """
    try:
        return _TOOLS.validate_python([{"function": _known(tool.get("function"))} for tool in tools])
    except pydantic.ValidationError as error:
        fault = describe(error.errors()[:1])
        raise ParameterError("tools", f"tools of the row: {fault}; correct the row, or send tools") from None


def _known(function: object) -> object:
    if not isinstance(function, Mapping):
        return function
    return {name: function[name] for name in ToolFunction.model_fields if name in function}
