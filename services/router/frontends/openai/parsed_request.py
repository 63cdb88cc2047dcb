"""What a request asks for, the same for both pages: prompts as ids, and how to answer them."""

import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.config import SamplingConfig
from penstock.model.chat_template import CallingMessage, Renderer, ToolCall
from penstock.records import ImagePart, Message, TextPart
from penstock.v1 import generate_pb2
from services.router.config import OpenAIConfig
from services.router.frontends.openai.errors import ParameterError
from services.router.frontends.openai.images import read_image
from services.router.frontends.openai.schemas import ChatMessage, ChatRequest, CompletionRequest, GenerationRequest
from services.router.frontends.openai.schemas import TextPart as TextPartIn
from services.router.frontends.openai.tool_calls import arguments_json

_MAX_NAME_CHARS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptIds:
    """A prompt as engines take it: one placeholder for each image."""

    input_ids: Sequence[int]
    images: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be played, and what to tell of it."""

    request_id: str
    session_id: str
    """Empty: of no session."""
    prompts: Sequence[PromptIds]
    num_choices: int
    """For each prompt; choices of one prompt follow each other."""
    sampling: generate_pb2.SamplingParams
    stops: Sequence[str]
    reads_tools: bool
    """Whether calls of tools are told apart from text."""
    shows_logprobs: bool
    shows_token_ids: bool
    shows_usage: bool
    """In a stream; other answers have it in any case."""
    is_recorded: bool

    def prompt_of(self, choice: int) -> PromptIds:
        """The prompt that the choice answers."""
        return self.prompts[choice // self.num_choices]

    @property
    def num_all(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.num_choices


class Reader:
    """Reads requests with one model's template; not for several threads at once."""

    def __init__(self, config: OpenAIConfig, sampling: SamplingConfig, renderer: Renderer) -> None:
        """What a request does not say is as in `sampling`."""
        self._config = config
        self._sampling = sampling
        self._renderer = renderer

    def read_chat(self, body: ChatRequest, *, session_id: str, is_recorded: bool) -> Asked:
        """A chat.

        Raises:
            InvalidRequestError: something in it cannot be.
        """
        self._require_few(body, num_prompts=1)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ParameterError("max_completion_tokens", "max_tokens and max_completion_tokens differ; send one")
        if body.tools and not self._renderer.takes_tools:
            raise ParameterError("tools", "tools: the model's chat template tells the assistant of no tools; leave out")
        images: list[bytes] = []
        messages = [
            self._message(message, images, param=f"messages.{place}") for place, message in enumerate(body.messages)
        ]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tool_choice != "none" else []
        ids = self._renderer.render_prompt(messages, num_images=len(images), tools=tools)
        return self._asked(
            body,
            [PromptIds(input_ids=ids, images=images)],
            name="chatcmpl",
            max_tokens=body.max_completion_tokens,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=bool(tools),
            shows_logprobs=body.logprobs,
        )

    def read_completion(self, body: CompletionRequest, *, session_id: str, is_recorded: bool) -> Asked:
        """Prompts to be gone on with.

        Raises:
            InvalidRequestError: something in it cannot be.
        """
        prompt = body.prompt
        several = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
        self._require_few(body, num_prompts=len(several))
        ids = [self._renderer.render_text(each) if isinstance(each, str) else _checked_ids(each) for each in several]
        if not ids or not all(ids):
            raise ParameterError("prompt", "prompt is empty; give text or token ids")
        return self._asked(
            body,
            [PromptIds(input_ids=each) for each in ids],
            name="cmpl",
            max_tokens=None,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=False,
            shows_logprobs=body.logprobs is not None,
        )

    def _asked(
        self, body: GenerationRequest, prompts: list[PromptIds], *, name: str, max_tokens: int | None, **rest: Any
    ) -> Asked:
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
                "temperature", "temperature = 0 is greedy, which has no logprobs to train on; do not record it"
            )
        return Asked(
            request_id=f"{name}-{uuid.uuid4().hex}",
            prompts=prompts,
            num_choices=body.n,
            sampling=sampling,
            stops=body.stops,
            shows_token_ids=body.return_token_ids,
            shows_usage=body.stream_options.include_usage,
            **rest,
        )

    def _require_few(self, body: GenerationRequest, *, num_prompts: int) -> None:
        """To be asked before anything is rendered, which takes long where there is much of it."""
        if body.n * num_prompts > self._config.max_choices:
            raise ParameterError(
                "n", f"n = {body.n} for {num_prompts} prompts is over router.openai.max_choices = "
                f"{self._config.max_choices}; send several requests"
            )  # fmt: skip

    def _message(self, message: ChatMessage, images: list[bytes], *, param: str) -> Message:
        """The message as the renderer knows it; its images are appended to `images`."""
        role = message.role
        if message.content is None and not message.tool_calls:
            raise ParameterError(f"{param}.content", f"{param}.content is missing")
        if message.tool_calls and role != "assistant":
            raise ParameterError(f"{param}.tool_calls", f"{param}.tool_calls: only an assistant calls tools")
        parts: list[TextPart | ImagePart] = []
        content = message.content or []
        for place, part in enumerate([TextPartIn(type="text", text=content)] if isinstance(content, str) else content):
            if isinstance(part, TextPartIn):
                parts.append(TextPart(text=part.text))
                continue
            where = f"{param}.content.{place}.image_url.url"
            if role not in ("user", "tool"):
                raise ParameterError(where, f"{where}: messages of role {role} show no images; let the user show it")
            if len(images) == self._config.max_images:
                raise ParameterError(where, f"{where}: more than router.openai.max_images = {len(images)} images")
            parts.append(ImagePart(index=len(images)))
            images.append(
                read_image(part.image_url.url, param=where, max_bytes=self._config.max_image_mb * 2**20)
            )  # fmt: skip
        told: Any = "system" if role == "developer" else role
        if message.tool_calls:
            calls = tuple(
                ToolCall(name=call.function.name, arguments=_arguments(call.function.arguments, f"{param}.tool_calls"))
                for call in message.tool_calls
            )
            return CallingMessage(role=told, parts=tuple(parts), tool_calls=calls)
        return Message(role=told, parts=tuple(parts))


def name_session(*, header: str, metadata: str, user: str) -> str:
    """The session that a request belongs to; what names it first holds.

    Raises:
        ParameterError: the name is too long.
    """
    name = header or metadata or user
    if len(name) > _MAX_NAME_CHARS:
        raise ParameterError("user", f"the session's name has {len(name)} characters; at most {_MAX_NAME_CHARS}")
    return name


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
        if isinstance(value, dict):
            return dict(json.loads(arguments_json(value)))
    except (ValueError, RecursionError):
        pass
    raise ParameterError(param, f"{param}: arguments = {text[:80]!r} is no JSON object")


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _checked_ids(prompt: Any) -> list[int]:
    if not all(isinstance(number, int) and 0 <= number < 2**31 for number in prompt):
        raise ParameterError("prompt", "prompt: token ids are integers of at least 0")
    return list(prompt)
