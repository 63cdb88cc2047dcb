"""What requests may hold. What the engine cannot do is refused by name, never passed over.

A null is as good as nothing. A parameter that is not supported is taken where its value changes nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import pydantic
from pydantic_core import PydanticCustomError

_NO_CONSTRAINT = "the engine does not constrain what the policy says"
_NO_PENALTY = "the policy's distribution is not changed, so that logprobs stay its own"
_SAMPLED_ONLY = "the engine tells the logprob of the sampled token only"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "there is text and images only"),
    "best_of": ((1,), "all choices are returned; use n"),
    "echo": ((False,), "the prompt is not returned; its ids are, with return_token_ids"),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "function_call": ((), "use tools"),
    "functions": (([],), "use tools"),
    "logit_bias": (({},), _NO_PENALTY),
    "modalities": ((["text"],), "there is text only"),
    "parallel_tool_calls": ((True,), _NO_CONSTRAINT),
    "prediction": ((), "there is no speculation"),
    "presence_penalty": ((0,), _NO_PENALTY),
    "reasoning_effort": ((), "put it into the prompt"),
    "response_format": (({"type": "text"},), _NO_CONSTRAINT),
    "seed": ((), "the engine's sampling is not seeded"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "use record"),
    "strict": ((False,), _NO_CONSTRAINT),
    "suffix": (("",), "the policy only goes on"),
    "top_logprobs": ((0,), _SAMPLED_ONLY),
}
"""Parameters that are not supported: which values change nothing, and why there are no others."""


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)
    _silent: ClassVar[tuple[str, ...]] = ()
    """What may come and means nothing."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sort_out(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = {name: each for name, each in value.items() if each is not None and name not in cls._silent}
        for name in [name for name in given if name in REFUSED and name not in cls.model_fields]:
            neutral, why = REFUSED[name]
            if not any(type(given[name]) is type(each) and given[name] == each for each in _spellings(neutral)):
                message = "is not supported ({why}); leave it out"
                raise PydanticCustomError("unsupported", message, {"name": name, "why": why})
            del given[name]
        return given


def _spellings(neutral: tuple[Any, ...]) -> list[Any]:
    return [*neutral, *(float(each) for each in neutral if type(each) is int)]


class TextPart(_Model):
    """Text in a message."""

    type: Literal["text"]
    text: str
    """The text."""


class ImageUrl(_Model):
    """Where an image is."""

    url: str
    """data:image/png;base64,..., or jpeg, webp or gif."""
    detail: Literal["auto", "high"] = "auto"
    """Images are seen as the model's processor sees them in training."""


class ImagePart(_Model):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """Where it is."""


Part: TypeAlias = Annotated[TextPart | ImagePart, pydantic.Field(discriminator="type")]
Content: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("text")] | Annotated[list[Part], pydantic.Tag("parts")],
    pydantic.Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]


class CalledFunction(_Model):
    """A function that an assistant called."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    arguments: str
    """A JSON object."""


class ToolCallIn(_Model):
    """A call that an assistant made."""

    id: str = ""
    """Its name in the answer."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """What was called."""


class ChatMessage(_Model):
    """One message of a conversation."""

    _silent = ("annotations", "refusal")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; developer is another word for system."""
    content: Content | None = None
    """What is said. Images may be in messages of users and tools."""
    tool_calls: list[ToolCallIn] = []
    """assistant: what it called."""
    tool_call_id: str = ""
    """tool: which call this answers. Templates go by the order."""


class ToolFunction(_Model):
    """A function that the policy may call."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    description: str | None = None
    """What it does."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""


class Tool(_Model):
    """What the policy may call."""

    type: Literal["function"]
    function: ToolFunction
    """The function."""


class StreamOptions(_Model):
    """How to stream."""

    _silent = ("include_obfuscation",)
    include_usage: bool = False
    """Send a last chunk with what was counted."""


class GenerationRequest(_Model):
    """What both pages take."""

    model: str
    """Name of the served policy; /v1/models tells it."""
    max_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] | None = None
    """Most tokens to produce; else as in the recipe's [sampling]."""
    temperature: Annotated[float, pydantic.Field(ge=0, le=100)] | None = None
    """Divides the logits; 0 is greedy. Else as in [sampling]."""
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    """Nucleus sampling. Else as in [sampling]."""
    top_k: Annotated[int, pydantic.Field(ge=-1, lt=2**31)] | None = None
    """Sample from so many of the likeliest tokens; 0 and -1: all. Else as in [sampling]. Not OpenAI's."""
    n: Annotated[int, pydantic.Field(ge=1)] = 1
    """How many choices to sample for each prompt."""
    stop: str | list[str] = []
    """Texts that end an answer and are not part of it, at most 16."""
    stop_token_ids: list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]] = []
    """Ids that end an answer beside the model's own. Not OpenAI's."""
    stream: bool = False
    """Send the answer as server-sent events while it comes."""
    stream_options: StreamOptions = StreamOptions()
    """How to stream."""
    user: str = ""
    """Names the session where nothing else does."""
    metadata: dict[str, str] = {}
    """`session_id` in it names the session: its calls go to one replica."""
    return_token_ids: bool = False
    """Return ids of prompt and answer with their logprobs. Not OpenAI's; as in vLLM."""
    record: bool = False
    """Keep the call under its session, to be trained on. Not OpenAI's."""

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

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
    """What the policy may call, where its chat template tells it of tools."""
    tool_choice: Literal["auto", "none"] = "auto"
    """none: do not tell it of tools."""


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """Text, which is never a special token whatever it says, or ids; or several of either."""
    logprobs: Annotated[int, pydantic.Field(ge=0)] | None = None
    """0: return the logprob of each sampled token; there are no others."""

    @pydantic.field_validator("logprobs")
    @classmethod
    def _is_zero(cls, logprobs: int | None) -> int | None:
        if logprobs:
            raise ValueError(f"{_SAMPLED_ONLY}; send 0")
        return logprobs
