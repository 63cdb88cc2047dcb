"""What requests may contain.

A parameter that would change the answer and is not supported is refused by name, never skipped; where its value changes
nothing, it is accepted. The policy neither sees nor needs unknown keys inside messages, which agents collect from other
servers' answers, so they are ignored. A null is the same as an absent key.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import pydantic
from pydantic_core import PydanticCustomError

_NO_CONSTRAINT = "the engine does not constrain what the policy says"
_NO_PENALTY = "the policy's distribution is not changed, so that logprobs stay its own"
_SAMPLED_ONLY = "the engine reports the logprob of the sampled token only"
_NO_MINIMUM = "an answer ends where the policy ends it"
_ROUTED = "the router chooses the replica and the order"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), "the assistant speaks next"),
    "audio": ((), "there is text and images only"),
    "best_of": ((1,), "all choices are returned; use n"),
    "continue_final_message": ((False,), "the assistant speaks next"),
    "continuous_usage_stats": ((False,), "usage comes with the last chunk"),
    "echo": ((False,), "the prompt is not returned; its ids are, with return_token_ids"),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "function_call": ((), "use tools"),
    "functions": (([],), "use tools"),
    "ignore_eos": ((False,), _NO_MINIMUM),
    "include_stop_str_in_output": ((False,), "the text ends before a stop string"),
    "length_penalty": ((1,), "there is no beam search"),
    "logit_bias": (({},), _NO_PENALTY),
    "min_p": ((0,), _NO_PENALTY),
    "min_tokens": ((0,), _NO_MINIMUM),
    "modalities": ((["text"],), "there is text only"),
    "no_stop_trim": ((False,), "the text ends before a stop string"),
    "prediction": ((), "there is no speculation"),
    "presence_penalty": ((0,), _NO_PENALTY),
    "priority": ((0,), _ROUTED),
    "reasoning_effort": ((), "put it into the prompt"),
    "repetition_penalty": ((1,), _NO_PENALTY),
    "response_format": (({"type": "text"},), _NO_CONSTRAINT),
    "return_hidden_states": ((False,), "the engine returns tokens only"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "skip_special_tokens": ((True,), "special tokens say nothing; their ids are in return_token_ids"),
    "spaces_between_special_tokens": ((True, False), "special tokens say nothing"),
    "store": ((False,), "use record"),
    "suffix": (("",), "the policy only continues a prompt"),
    "top_logprobs": ((0,), _SAMPLED_ONLY),
    "use_beam_search": ((False,), "there is no beam search"),
}
"""Parameters that are not supported: the values that change nothing, and why there are no others."""

HINTS = ("cache_salt", "prompt_cache_key", "request_id", "rid", "safety_identifier", "verbosity")
"""Parameters that are accepted with any value, because no answer depends on them."""


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)
    _ignored: ClassVar[tuple[str, ...]] = ()
    """Keys that are accepted with any value."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = {name: each for name, each in value.items() if each is not None and name not in cls._ignored}
        if cls.model_config.get("extra") == "ignore":
            return given
        for name in [name for name in given if name in REFUSED and name not in cls.model_fields]:
            neutral, why = REFUSED[name]
            if not any(type(given[name]) is type(each) and given[name] == each for each in _spellings(neutral)):
                message = "is not supported ({why}); leave it out"
                raise PydanticCustomError("unsupported", message, {"name": name, "why": why})
            del given[name]
        return given


class _MessageModel(_Model):
    """A part of a message: unknown keys are ignored."""

    model_config = pydantic.ConfigDict(extra="ignore", use_attribute_docstrings=True)


def _spellings(neutral: tuple[Any, ...]) -> list[Any]:
    return [*neutral, *(float(each) for each in neutral if type(each) is int)]


class TextPart(_MessageModel):
    """Text in a message."""

    type: Literal["text"]
    text: str
    """The text."""


class RefusalPart(_MessageModel):
    """An earlier refusal of the assistant; the policy sees it as text."""

    type: Literal["refusal"]
    refusal: str
    """The text."""


class ImageUrl(_MessageModel):
    """An image."""

    url: str
    """data:image/png;base64,..., or jpeg, webp or gif."""
    detail: Literal["auto", "high"] = "auto"
    """The policy sees images as in training, whatever this says."""


class ImagePart(_MessageModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The image."""


Part: TypeAlias = Annotated[TextPart | RefusalPart | ImagePart, pydantic.Field(discriminator="type")]
Content: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("text")] | Annotated[list[Part], pydantic.Tag("parts")],
    pydantic.Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]
PART_TYPES = ("text", "refusal", "image_url")
"""The types of parts."""


class CalledFunction(_MessageModel):
    """A function that an assistant called."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    arguments: str
    """A JSON object."""


class ToolCallIn(_MessageModel):
    """A call that an assistant made."""

    id: str = ""
    """Its id in the answer."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """What was called."""


class ChatMessage(_MessageModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; developer is another word for system."""
    content: Content | None = None
    """What is said. Messages of users and tools may hold images."""
    tool_calls: list[ToolCallIn] = []
    """assistant: what it called."""
    tool_call_id: str = ""
    """tool: which call this answers. Templates go by the order."""


class ToolFunction(_Model):
    """A function that the policy may call."""

    _ignored = ("strict",)
    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    description: str | None = None
    """What it does."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""


class Tool(_Model):
    """What the policy may call."""

    _ignored = ("strict",)
    type: Literal["function"]
    function: ToolFunction
    """The function."""


class StreamOptions(_Model):
    """How to stream."""

    _ignored = ("include_obfuscation",)
    include_usage: bool = False
    """Send a last chunk with the token counts."""


class GenerationRequest(_Model):
    """What chats and completions accept."""

    _ignored = HINTS
    model: str
    """Name of the served policy, as in /v1/models."""
    max_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] | None = None
    """Most tokens to generate; default: the recipe's [sampling]."""
    temperature: Annotated[float, pydantic.Field(ge=0, le=100)] | None = None
    """Divides the logits; 0 is greedy. Default: [sampling]."""
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Nucleus sampling. Default: [sampling]."""
    top_k: Annotated[int, pydantic.Field(ge=-1, lt=2**31)] | None = None
    """Sample from this many of the likeliest tokens; 0 and -1: all. Default: [sampling]. Not OpenAI's."""
    n: Annotated[int, pydantic.Field(ge=1)] = 1
    """Choices to sample for each prompt."""
    seed: int | None = None
    """Accepted and not used: the engine's sampling is not seeded. The header x-penstock-ignored says so."""
    stop: str | list[str] = []
    """Texts that end an answer and are not part of it, at most 16."""
    stop_token_ids: list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]] = []
    """Ids that end an answer beside the model's own. Not OpenAI's."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions = StreamOptions()
    """How to stream."""
    user: str = ""
    """Names the session if nothing else does."""
    metadata: dict[str, str] = {}
    """`session_id` in it names the session: its calls go to one replica."""
    return_token_ids: bool = False
    """Return the ids of prompt and answer with their logprobs. Not OpenAI's; as in vLLM."""
    record: bool = False
    """Keep the call under its session, to be trained on. Not OpenAI's."""

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def unused(self) -> list[str]:
        """Parameters that were accepted though they have no effect."""
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

    messages: Annotated[list[ChatMessage], pydantic.Field(min_length=1)]
    """The conversation."""
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] | None = None
    """Another word for max_tokens."""
    logprobs: bool = False
    """Return the logprob of each sampled token."""
    tools: list[Tool] = []
    """What the policy may call, if its chat template supports tools. `strict` in them has no effect."""
    tool_choice: Literal["auto", "none"] = "auto"
    """none: the policy does not see the tools."""
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """Text, which never becomes a special token, or ids; or several of either."""
    logprobs: Annotated[int, pydantic.Field(ge=0)] | None = None
    """0: return the logprob of each sampled token; there are no others."""

    @pydantic.field_validator("logprobs")
    @classmethod
    def _is_zero(cls, logprobs: int | None) -> int | None:
        if logprobs:
            raise ValueError(f"{_SAMPLED_ONLY}; send 0")
        return logprobs
