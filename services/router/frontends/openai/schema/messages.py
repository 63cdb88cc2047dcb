"""Messages and tools in requests."""

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from services.router.frontends.openai.schema.base import Items, MessageModel, RequestModel


class TextPart(MessageModel):
    """Text in a message."""

    type: Literal["text"]
    text: str
    """The text."""


class RefusalPart(MessageModel):
    """An earlier refusal of the assistant; the policy sees it as text."""

    type: Literal["refusal"]
    refusal: str
    """The text."""


class ImageUrl(MessageModel):
    """An image."""

    url: str
    """data:image/png;base64,..., or jpeg, webp or gif."""
    detail: Literal["auto", "low", "high"] = "auto"
    """No effect: the policy sees images as in training."""


class ImagePart(MessageModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The image."""


Part: TypeAlias = Annotated[TextPart | RefusalPart | ImagePart, pydantic.Field(discriminator="type")]
Content: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("text")] | Annotated[Items[Part], pydantic.Tag("parts")],
    pydantic.Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]
PART_TYPES = ("text", "refusal", "image_url")
"""The types of parts."""


class CalledFunction(MessageModel):
    """A function that an assistant called."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    arguments: str
    """A JSON object."""


class ToolCallIn(MessageModel):
    """A call that an assistant made."""

    id: str = ""
    """Its id in the answer."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """The called function."""


class ChatMessage(MessageModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """The speaker; developer is a synonym of system."""
    content: Content | None = None
    """The text. Messages of users and tools may hold images."""
    tool_calls: Items[ToolCallIn] = pydantic.Field(default_factory=list)
    """assistant: its calls."""
    tool_call_id: str = ""
    """tool: the call that this answers. Templates go by the order."""


class ToolFunction(RequestModel):
    """A function that the policy may call."""

    _ignored = ("strict", "return")
    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""
    description: str | None = None
    """Its purpose."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""


class Tool(RequestModel):
    """A tool that the policy may call."""

    _ignored = ("strict",)
    type: Literal["function"] = "function"
    function: ToolFunction
    """The function."""


class NamedFunction(RequestModel):
    """The name of a function."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    """Its name."""


class NamedTool(RequestModel):
    """The function that the policy must call."""

    type: Literal["function"] = "function"
    function: NamedFunction
    """The function, by name."""


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], pydantic.Tag("word")] | Annotated[NamedTool, pydantic.Tag("tool")],
    pydantic.Discriminator(lambda value: "word" if isinstance(value, str) else "tool"),
]
TOOL_CHOICE_TAGS = ("word", "tool")
