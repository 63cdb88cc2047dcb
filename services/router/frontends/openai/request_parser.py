"""Parses requests into prompts of ids.

Invariant: what cannot fit into the context is refused by its size, before it is rendered, tokenised or packed.
"""

import array
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from penstock.config import SamplingConfig
from penstock.model.chat.chat_template import Renderer
from penstock.model.chat.reasoning import CLOSE
from penstock.records import Message, TextPart
from penstock.v1 import generate_pb2
from services.router.frontends.openai.errors import ParameterError, TextTooLongError
from services.router.frontends.openai.parsed_request import ParsedRequest, PromptIds, pack_ids
from services.router.frontends.openai.parsing.constraint import read_constraint
from services.router.frontends.openai.parsing.forced_call import begin_call
from services.router.frontends.openai.parsing.message_parser import read_messages
from services.router.frontends.openai.parsing.text_sizes import size_of_chat, size_of_text, size_of_tools
from services.router.frontends.openai.schema.messages import NamedTool
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.router.tuning import OpenAITuning

_MAX_NAME_CHARS = 256
_UNBOUNDED = 2**20
"""Token limit of an answer that may use the rest of a context of unknown length; engines cut it."""

IdsT = TypeVar("IdsT", list[int], "array.array[int]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadChat:
    """The content of a chat before it is rendered."""

    messages: Sequence[Message]
    images: Sequence[bytes]
    """In the order of the messages' image parts."""
    tools: Sequence[Mapping[str, Any]]
    """The tools as the policy sees them."""
    template_kwargs: Mapping[str, Any]
    """Further variables of the chat template."""


Compose: TypeAlias = Callable[[Renderer, ReadChat], PromptIds]
"""Makes the prompt of a chat."""


def compose_whole(renderer: Renderer, chat: ReadChat) -> PromptIds:
    """Make the prompt by rendering the whole chat."""
    ids = renderer.render_prompt(
        chat.messages, num_images=len(chat.images), tools=chat.tools, template_kwargs=chat.template_kwargs
    )
    return PromptIds(input_ids=pack_ids(ids), images=chat.images)


class RequestParser:
    """Parses requests with one model's template and tokenizer; use it in one thread at a time."""

    def __init__(
        self,
        tuning: OpenAITuning,
        sampling: SamplingConfig,
        renderer: Renderer,
        *,
        longest_token_bytes: int,
        context_length: Callable[[], int | None],
        default_max_tokens: int | None = None,
        separates_reasoning: bool = False,
    ) -> None:
        """Prepare to parse.

        Args:
            tuning: Bounds.
            sampling: Defaults of requests.
            renderer: Makes ids of messages.
            longest_token_bytes: Size of the longest token of the vocabulary.
            context_length: Maximum tokens that an engine takes, or took before the last one left; None: unknown.
            default_max_tokens: Maximum tokens of an answer if the request does not say; 0: the rest of the context;
                None: as in `sampling`.
            separates_reasoning: Whether to separate reasoning from content if the request does not say.
        """
        self._default_max_tokens = default_max_tokens
        self._separates_reasoning = separates_reasoning
        self._tuning = tuning
        self._sampling = sampling
        self._renderer = renderer
        self._context_length = context_length
        self._longest_token_bytes = longest_token_bytes

    def parse_chat(
        self, body: ChatRequest, *, session_id: str, is_recorded: bool, compose: Compose = compose_whole
    ) -> ParsedRequest:
        """Parse a chat; `compose` makes its prompt.

        Raises:
            InvalidRequestError: the chat is invalid.
        """
        self._require_few(body, num_prompts=1)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ParameterError("max_completion_tokens", "max_tokens and max_completion_tokens differ; send one")
        if body.tools and not self._renderer.takes_tools:
            raise ParameterError("tools", "tools: the model's chat template does not support tools; leave them out")
        shown_tools = body.tools if body.tool_choice != "none" else []
        self._require_short("messages", size_of_chat(body))
        self._require_short("tools", size_of_tools(shown_tools))
        begun_call = begin_call(body, self._renderer.call_format)
        messages, images = read_messages(body.messages, self._tuning)
        tools = [tool.model_dump(exclude_none=True) for tool in shown_tools]
        begun = _take_begun(messages) if body.continue_final_message else begun_call
        if begun_call and body.continue_final_message:
            raise ParameterError("continue_final_message", "continue_final_message and tool_choice exclude each other")
        prompt = compose(
            self._renderer,
            ReadChat(messages=messages, images=images, tools=tools, template_kwargs=body.chat_template_kwargs),
        )
        thinks = self._renderer.opens_thinking(body.chat_template_kwargs)
        if thinks and begun:
            begun, thinks = f"\n{CLOSE}\n\n{begun}", False
        ids = pack_ids([*prompt.input_ids, *self._renderer.render_text(begun)]) if begun else prompt.input_ids
        separates = self._separates_reasoning if body.separate_reasoning is None else body.separate_reasoning
        return self._parsed(
            body,
            [dataclasses.replace(prompt, input_ids=self._truncated(body, ids, num_images=len(images)))],
            name="chatcmpl",
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=bool(tools),
            tools=tools,
            has_one_call=bool(tools) and (not body.parallel_tool_calls or isinstance(body.tool_choice, NamedTool)),
            begun_call=begun_call,
            thinks=thinks,
            separates_reasoning=separates,
            shows_logprobs=body.logprobs,
            num_top_logprobs=body.top_logprobs,
            echoes_prompt=False,
        )

    def parse_completion(self, body: CompletionRequest, *, session_id: str, is_recorded: bool) -> ParsedRequest:
        """Parse prompts to be continued.

        Raises:
            InvalidRequestError: the request is invalid.
        """
        self._require_few(body, num_prompts=len(body.prompts))
        prompts = [each if isinstance(each, str) else self._truncated(body, each) for each in body.prompts]
        for each in prompts:
            if isinstance(each, str):
                self._require_short("prompt", size_of_text(each))
            else:
                self._require_fitting(each)
        ids = [
            self._truncated(body, pack_ids(self._renderer.render_text(each)))
            if isinstance(each, str)
            else _checked_ids(each)
            for each in prompts
        ]
        if not ids or not all(ids):
            raise ParameterError("prompt", "prompt is empty; give text or token ids")
        return self._parsed(
            body,
            [PromptIds(input_ids=each) for each in ids],
            name="cmpl",
            max_tokens=body.max_tokens,
            session_id=session_id,
            is_recorded=is_recorded,
            reads_tools=False,
            tools=(),
            has_one_call=False,
            begun_call="",
            thinks=False,
            separates_reasoning=False,
            shows_logprobs=body.logprobs is not None,
            num_top_logprobs=body.logprobs or 0,
            echoes_prompt=body.echo,
        )

    def _parsed(
        self, body: GenerationRequest, prompts: list[PromptIds], *, name: str, max_tokens: int | None, **rest: Any
    ) -> ParsedRequest:
        default, constraint = self._sampling, read_constraint(body)
        if max_tokens is None:
            max_tokens = default.max_new_tokens if self._default_max_tokens is None else self._default_max_tokens
            has_tokens = True
        else:
            has_tokens = max_tokens > 0
        if body.min_tokens and body.min_tokens != max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens = {body.min_tokens} is not supported where it is not max_tokens, which is {max_tokens}; "
                "leave it out, or make them equal",
            )
        sampling = generate_pb2.SamplingParams(
            temperature=default.temperature if body.temperature is None else body.temperature,
            top_p=default.top_p if body.top_p is None else body.top_p,
            top_k=max(0, default.top_k if body.top_k is None else body.top_k),
            max_new_tokens=(max_tokens or self._context_length() or _UNBOUNDED) if has_tokens else 1,
            stop_token_ids=body.stop_token_ids,
            ignore_end=body.ignore_eos or body.min_tokens > 0,
            constraint=constraint,
        )
        if rest["is_recorded"]:
            _require_trainable(sampling, has_tokens=has_tokens)
        return ParsedRequest(
            request_id=f"{name}-{uuid.uuid4().hex}",
            prompts=prompts,
            num_choices=body.n,
            sampling=sampling,
            stops=body.stops,
            includes_stop=body.include_stop_str_in_output,
            has_tokens=has_tokens,
            num_prompt_logprobs=body.prompt_logprobs,
            names_ids=body.return_tokens_as_token_ids,
            shows_usage_always=body.stream_options.continuous_usage_stats,
            shows_token_ids=body.return_token_ids,
            shows_usage=body.stream_options.include_usage,
            ignored=body.unused,
            call_format=self._renderer.call_format,
            **rest,
        )

    def _truncated(self, body: GenerationRequest, ids: IdsT, *, num_images: int = 0) -> IdsT:
        """Return the prompt's last tokens if the request truncates it, else the whole prompt."""
        if body.truncate_prompt_tokens is None:
            return ids
        if num_images:
            raise ParameterError(
                "truncate_prompt_tokens", f"truncate_prompt_tokens: the prompt has {num_images} images; leave it out"
            )
        return ids[-body.truncate_prompt_tokens :]

    def _require_few(self, body: GenerationRequest, *, num_prompts: int) -> None:
        """Check the number of prompts and choices before rendering, which takes long for many prompts."""
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

    def _require_fitting(self, ids: Sequence[int]) -> None:
        """Refuse a prompt of more ids than the context has."""
        context_length = self._context_length()
        if context_length is not None and len(ids) > context_length:
            raise TextTooLongError(
                "prompt",
                f"prompt has {len(ids)} token ids, more than the context of {context_length} tokens; shorten it, or "
                "set truncate_prompt_tokens",
            )


def _require_trainable(sampling: generate_pb2.SamplingParams, *, has_tokens: bool) -> None:
    """Refuse to record tokens that are not sampled from the policy's distribution.

    Raises:
        ParameterError: names the parameter.
    """
    if sampling.temperature == 0:
        raise ParameterError(
            "temperature",
            "temperature = 0 is greedy: its logprobs are not those of a distribution that was sampled; do not record "
            "it",
        )
    if sampling.HasField("constraint"):
        raise ParameterError(
            "response_format",
            "the logprobs of an answer that must have a form are not the policy's own; do not record it",
        )
    if not has_tokens:
        raise ParameterError("max_tokens", "max_tokens = 0: there is nothing to record; do not record it")


def _take_begun(messages: list[Message]) -> str:
    """Remove the last message, and return its text.

    Raises:
        ParameterError: it is not an assistant's text.
    """
    last = messages.pop()
    if last.role != "assistant" or last.tool_calls or not messages:
        raise ParameterError(
            "continue_final_message", "continue_final_message needs a last message of the assistant, of text only"
        )
    return "".join(part.text for part in last.parts if isinstance(part, TextPart))


def name_session(*, header: str, metadata: str, user: str) -> str:
    """Return the session of a request: the first of these that is given.

    Raises:
        ParameterError: the name is too long.
    """
    name = header or metadata or user
    if len(name) > _MAX_NAME_CHARS:
        raise ParameterError("user", f"the session's name has {len(name)} characters; at most {_MAX_NAME_CHARS}")
    return name


def _checked_ids(ids: list[int]) -> "array.array[int]":
    for number in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= number < 2**31:
            raise ParameterError("prompt", f"prompt has the token id {number}; ids are integers from 0 to {2**31 - 1}")
    return pack_ids(ids)
