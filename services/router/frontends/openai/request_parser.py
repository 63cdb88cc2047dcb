"""Requests to prompts of ids.

Invariant: a text that cannot fit into the context is refused by its size, before it is rendered or tokenised.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from penstock.config import SamplingConfig
from penstock.model.argument_values import read_json
from penstock.model.chat_template import Renderer
from penstock.records import ImagePart, Message, TextPart, ToolCall
from penstock.v1 import generate_pb2
from services.router.frontends.openai.errors import ParameterError, TextTooLongError
from services.router.frontends.openai.images import read_image
from services.router.frontends.openai.parsed_request import ParsedRequest, PromptIds
from services.router.frontends.openai.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RefusalPart,
)
from services.router.frontends.openai.schemas import TextPart as TextPartIn
from services.router.tuning import OpenAITuning

_MAX_NAME_CHARS = 256


class RequestParser:
    """Parses requests with one model's template and tokenizer; not in several threads at once."""

    def __init__(
        self,
        tuning: OpenAITuning,
        sampling: SamplingConfig,
        renderer: Renderer,
        *,
        longest_token_bytes: int,
        context_length: Callable[[], int | None],
    ) -> None:
        """Prepare to parse.

        Args:
            tuning: Bounds.
            sampling: Defaults of requests.
            renderer: Makes ids of messages.
            longest_token_bytes: Size of the longest token of the vocabulary.
            context_length: Most tokens that an engine takes at the moment; None: unknown.
        """
        self._tuning = tuning
        self._sampling = sampling
        self._renderer = renderer
        self._context_length = context_length
        self._longest_token_bytes = longest_token_bytes

    def parse_chat(self, body: ChatRequest, *, session_id: str, is_recorded: bool) -> ParsedRequest:
        """Parse a chat.

        Raises:
            InvalidRequestError: something in it is invalid.
        """
        self._require_few(body, num_prompts=1)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ParameterError("max_completion_tokens", "max_tokens and max_completion_tokens differ; send one")
        if body.tools and not self._renderer.takes_tools:
            raise ParameterError("tools", "tools: the model's chat template does not support tools; leave them out")
        images: list[bytes] = []
        messages = [
            self._message(message, images, param=f"messages.{index}") for index, message in enumerate(body.messages)
        ]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tool_choice != "none" else []
        self._require_short("messages", size_of_chat(body))
        ids = self._renderer.render_prompt(messages, num_images=len(images), tools=tools)
        return self._parsed(
            body,
            [PromptIds(input_ids=ids, images=images)],
            name="chatcmpl",
            max_tokens=body.max_completion_tokens,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=bool(tools),
            tools=tools,
            has_one_call=bool(tools) and not body.parallel_tool_calls,
            shows_logprobs=body.logprobs,
        )

    def parse_completion(self, body: CompletionRequest, *, session_id: str, is_recorded: bool) -> ParsedRequest:
        """Parse prompts to be continued.

        Raises:
            InvalidRequestError: something in them is invalid.
        """
        prompt = body.prompt
        several = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
        self._require_few(body, num_prompts=len(several))
        for each in several:
            if isinstance(each, str):
                self._require_short("prompt", _num_bytes(each))
        ids = [self._renderer.render_text(each) if isinstance(each, str) else _checked_ids(each) for each in several]
        if not ids or not all(ids):
            raise ParameterError("prompt", "prompt is empty; give text or token ids")
        return self._parsed(
            body,
            [PromptIds(input_ids=each) for each in ids],
            name="cmpl",
            max_tokens=None,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=False,
            tools=(),
            has_one_call=False,
            shows_logprobs=body.logprobs is not None,
        )

    def _parsed(
        self, body: GenerationRequest, prompts: list[PromptIds], *, name: str, max_tokens: int | None, **rest: Any
    ) -> ParsedRequest:
        default = self._sampling
        sampling = generate_pb2.SamplingParams(
            temperature=default.temperature if body.temperature is None else body.temperature,
            top_p=default.top_p if body.top_p is None else body.top_p,
            top_k=max(0, default.top_k if body.top_k is None else body.top_k),
            max_new_tokens=max_tokens or body.max_tokens or default.max_new_tokens,
            stop_token_ids=body.stop_token_ids,
        )
        if rest["is_recorded"] and sampling.temperature == 0:
            raise ParameterError(
                "temperature",
                "temperature = 0 is greedy: its logprobs are not those of a distribution that was sampled; do not "
                "record it",
            )
        return ParsedRequest(
            request_id=f"{name}-{uuid.uuid4().hex}",
            prompts=prompts,
            num_choices=body.n,
            sampling=sampling,
            stops=body.stops,
            shows_token_ids=body.return_token_ids,
            shows_usage=body.stream_options.include_usage,
            ignored=body.unused,
            call_format=self._renderer.call_format,
            **rest,
        )

    def _require_few(self, body: GenerationRequest, *, num_prompts: int) -> None:
        """Checked before anything is rendered, which takes long for many prompts."""
        if body.n * num_prompts > self._tuning.max_choices:
            raise ParameterError(
                "n", f"n = {body.n} for {num_prompts} prompts is over the "
                f"{self._tuning.max_choices} choices of one request; send several requests"
            )  # fmt: skip

    def _require_short(self, param: str, num_bytes: int) -> None:
        """Refuse a text that is too long even if every token were the vocabulary's longest."""
        context_length = self._context_length()
        if context_length is not None and num_bytes > context_length * self._longest_token_bytes:
            raise TextTooLongError(
                param,
                f"{param} has {num_bytes} bytes of text, more than fit into the context of {context_length} tokens; "
                "shorten it",
            )

    def _message(self, message: ChatMessage, images: list[bytes], *, param: str) -> Message:
        """The message as the renderer knows it; its images are appended to `images`."""
        role = message.role
        if message.content is None and role != "assistant":
            raise ParameterError(f"{param}.content", f"{param}.content is missing")
        if message.tool_calls and role != "assistant":
            raise ParameterError(f"{param}.tool_calls", f"{param}.tool_calls: only an assistant calls tools")
        parts: list[TextPart | ImagePart] = []
        content = message.content or []
        for index, part in enumerate([TextPartIn(type="text", text=content)] if isinstance(content, str) else content):
            if isinstance(part, TextPartIn | RefusalPart):
                parts.append(TextPart(text=part.text if isinstance(part, TextPartIn) else part.refusal))
                continue
            where = f"{param}.content.{index}.image_url.url"
            if role not in ("user", "tool"):
                raise ParameterError(where, f"{where}: messages of role {role} hold no images; let the user show it")
            if len(images) == self._tuning.max_images:
                raise ParameterError(where, f"{where}: more than {len(images)} images; leave out the oldest")
            parts.append(ImagePart(index=len(images)))
            images.append(
                read_image(part.image_url.url, param=where, max_bytes=self._tuning.max_image_bytes)
            )  # fmt: skip
        template_role: Any = "system" if role == "developer" else role
        calls: tuple[ToolCall, ...] = ()
        if message.tool_calls:
            calls = tuple(
                ToolCall(name=call.function.name, arguments=_arguments(call.function.arguments, f"{param}.tool_calls"))
                for call in message.tool_calls
            )
        return Message(role=template_role, parts=tuple(parts), tool_calls=calls)


def name_session(*, header: str, metadata: str, user: str) -> str:
    """The session of a request: the first of these that is given.

    Raises:
        ParameterError: the name is too long.
    """
    name = header or metadata or user
    if len(name) > _MAX_NAME_CHARS:
        raise ParameterError("user", f"the session's name has {len(name)} characters; at most {_MAX_NAME_CHARS}")
    return name


def size_of_chat(body: ChatRequest) -> int:
    """Bytes of the messages' text, images aside."""
    num_bytes = 0
    for message in body.messages:
        content: Sequence[Any] = message.content or ()
        parts = (content,) if isinstance(content, str) else content
        for part in parts:
            match part:
                case str():
                    num_bytes += _num_bytes(part)
                case TextPartIn():
                    num_bytes += _num_bytes(part.text)
                case RefusalPart():
                    num_bytes += _num_bytes(part.refusal)
        num_bytes += sum(_num_bytes(call.function.arguments) for call in message.tool_calls)
    return num_bytes


def size_of_completion(body: CompletionRequest) -> int:
    """Bytes of the prompts' text; ids need no tokeniser."""
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    return sum(_num_bytes(each) for each in prompts if isinstance(each, str))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        value = read_json(text or "{}")
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise ParameterError(param, f"{param}: arguments = {text[:80]!r} is not a JSON object")


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _checked_ids(prompt: Any) -> list[int]:
    if not all(isinstance(number, int) and 0 <= number < 2**31 for number in prompt):
        raise ParameterError("prompt", "prompt: token ids are integers of at least 0")
    return list(prompt)
