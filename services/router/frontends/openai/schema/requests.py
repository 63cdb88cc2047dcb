"""The bodies of requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

import pydantic

from services.router.frontends.openai.schema.base import HINTS, Items, RequestModel, parameter_fault
from services.router.frontends.openai.schema.constraint import ResponseFormat, StructuredOutputs
from services.router.frontends.openai.schema.messages import ChatMessage, Tool, ToolChoice

_MAX_TOP = 20
_FORMS = {
    "ebnf": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
    "regex": "regex",
}
"""Other servers' names of the fields of structured_outputs."""

TopCount: TypeAlias = Annotated[int, pydantic.Field(ge=0, le=_MAX_TOP)]
"""Number of most likely tokens to report; engines report no more."""


def _kind_of(prompt: Any) -> str:
    """Return the tag of a prompt, by its first item: trying all kinds would take as long as the longest of them, and
    blame the wrong thing."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "several" if isinstance(first, list) else "ids"


Prompt: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("text")]
    | Annotated[Items[str], pydantic.Tag("texts")]
    | Annotated[Items[int], pydantic.Tag("ids")]
    | Annotated[Items[Items[int]], pydantic.Tag("several")],
    pydantic.Discriminator(_kind_of),
]


class StreamOptions(RequestModel):
    """How to stream."""

    _ignored = ("include_obfuscation",)
    include_usage: bool = False
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Send the counts so far with each chunk, too. Not OpenAI's; as in vLLM."""


class GenerationRequest(RequestModel):
    """Parameters common to chats and completions."""

    _ignored = HINTS
    model: str
    """Name of the served policy, as in /v1/models."""
    max_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] | None = None
    """Maximum tokens to generate; default: the recipe's [sampling]."""
    temperature: Annotated[float, pydantic.Field(ge=0, le=100)] | None = None
    """Divides the logits; 0 is greedy. Default: [sampling]."""
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Nucleus sampling. Default: [sampling]."""
    top_k: Annotated[int, pydantic.Field(ge=-1, lt=2**31)] | None = None
    """Sample from this many of the most likely tokens; 0 and -1: all. Default: [sampling]. Not OpenAI's."""
    n: Annotated[int, pydantic.Field(ge=1)] = 1
    """Choices to sample for each prompt."""
    seed: int | None = None
    """Accepted and not used: the engine's sampling is not seeded. The header x-penstock-ignored says so."""
    stop: str | Items[str] = pydantic.Field(default_factory=list)
    """Texts that end an answer and are not part of it, at most 16."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop text that was found, instead of before it. Not OpenAI's; SGLang calls it
    `no_stop_trim`."""
    stop_token_ids: Items[Annotated[int, pydantic.Field(ge=0, lt=2**31)]] = pydantic.Field(default_factory=list)
    """Ids that end an answer beside the model's own. Not OpenAI's."""
    ignore_eos: bool = False
    """Ignore end tokens: the answer has max_tokens tokens. Not OpenAI's."""
    min_tokens: Annotated[int, pydantic.Field(ge=0)] = 0
    """0, or max_tokens, which is ignore_eos. Not OpenAI's."""
    prompt_logprobs: TopCount | None = None
    """Return each prompt token's logprob, with this many of the most likely tokens. Not OpenAI's; as in vLLM."""
    return_tokens_as_token_ids: bool = False
    """Name tokens `token_id:<id>` in logprobs, where texts may be ambiguous. Not OpenAI's; as in vLLM."""
    truncate_prompt_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    """Keep only this many of the prompt's last tokens; not with images. Not OpenAI's; as in vLLM."""
    response_format: ResponseFormat | None = None
    """The required form of the answer: text, a JSON object, or a JSON value that a schema allows."""
    structured_outputs: StructuredOutputs | None = None
    """The same, and regular expressions, choices and grammars, as in vLLM. Its older `guided_json`, `guided_regex`,
    `guided_choice` and `guided_grammar`, and SGLang's `json_schema`, `regex` and `ebnf`, are accepted as synonyms."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions = StreamOptions()
    """How to stream."""
    user: str = ""
    """Names the session if no other field does."""
    metadata: dict[str, str] = pydantic.Field(default_factory=dict)
    """`session_id` in it names the session: its calls go to one replica."""
    return_token_ids: bool = False
    """Return the ids of prompt and answer with their logprobs. Not OpenAI's; as in vLLM."""
    record: bool = False
    """Record the call under its session, for training. Not OpenAI's."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _translate(cls, value: Any) -> Any:
        """Translate other servers' names of parameters that have a name here."""
        if not isinstance(value, Mapping):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        if "no_stop_trim" in given:
            given.setdefault("include_stop_str_in_output", given.pop("no_stop_trim"))
        forms = [name for name in given if name in _FORMS]
        if forms:
            if "structured_outputs" in given or len(forms) > 1:
                raise parameter_fault(forms[0], "is one of several forms for the answer; send only one")
            given["structured_outputs"] = {_FORMS[forms[0]]: given.pop(forms[0])}
        return given

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.ignore_eos and self.stop_token_ids:
            raise parameter_fault("ignore_eos", "and stop_token_ids are both set; leave one out")
        if not self.stream and "stream_options" in self.model_fields_set:
            raise parameter_fault("stream_options", "is for streams only; set stream, or leave it out")
        return self

    @property
    def stops(self) -> list[str]:
        """Return `stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def unused(self) -> list[str]:
        """Return the parameters that were accepted though they have no effect."""
        return [] if self.seed is None else ["seed"]

    @pydantic.field_validator("stop")
    @classmethod
    def _is_usable(cls, stop: str | list[str]) -> str | list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > 16 or not all(0 < len(each) <= 1000 for each in stops):
            raise ValueError("give at most 16 texts of 1 to 1000 characters")
        return stop


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[Items[ChatMessage], pydantic.Field(min_length=1)]
    """The conversation."""
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] | None = None
    """Synonym of max_tokens."""
    logprobs: bool = False
    """Return the logprob of each sampled token."""
    top_logprobs: TopCount = 0
    """With logprobs, also report this many of the most likely tokens at each position."""
    tools: Items[Tool] = pydantic.Field(default_factory=list)
    """Tools that the policy may call, if its chat template supports tools. `strict` and `return` in them
    have no effect."""
    tool_choice: ToolChoice = "auto"
    """none: the policy does not see the tools. required, or a named function: its answer starts with the beginning of a
    call, which is put into the prompt."""
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""
    chat_template_kwargs: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`. Not OpenAI's; as in vLLM and SGLang."""
    continue_final_message: bool = False
    """Continue the last message, which is the assistant's, instead of answering it. Not OpenAI's; as in vLLM."""
    separate_reasoning: bool | None = None
    """Whether the text between `<think>` and `</think>` is returned as `reasoning_content` instead of in `content`.
    Default: router.openai.separate_reasoning. Not OpenAI's; as in SGLang."""

    @pydantic.model_validator(mode="after")
    def _counts_what_it_shows(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise parameter_fault("top_logprobs", "needs logprobs; set it to true")
        return self


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompt
    """Text, which never becomes a special token, or ids; or several of either."""
    max_tokens: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    """Maximum tokens to generate; 0: only score the prompt. Default: the recipe's [sampling]."""
    logprobs: TopCount | None = None
    """Return the logprob of each sampled token, and this many of the most likely tokens at each position."""
    echo: bool = False
    """Return the prompt before the answer; with logprobs, also for its tokens."""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return `prompt` as a list of texts or of lists of ids."""
        prompt: Any = self.prompt
        prompts: list[str | list[int]] = [prompt] if _kind_of(prompt) in ("text", "ids") else prompt
        return prompts
