"""Converts the messages of requests for the renderer."""

from collections.abc import Sequence
from typing import Any

from penstock.model.chat.argument_values import read_json
from penstock.records import ImagePart, Message, TextPart, ToolCall
from services.router.frontends.openai.errors import ParameterError
from services.router.frontends.openai.parsing.images import read_image
from services.router.frontends.openai.schema.messages import ChatMessage, RefusalPart
from services.router.frontends.openai.schema.messages import TextPart as TextPartIn
from services.router.tuning import OpenAITuning


def read_messages(messages: Sequence[ChatMessage], tuning: OpenAITuning) -> tuple[list[Message], list[bytes]]:
    """Return the messages, and their images in order.

    Raises:
        ParameterError: one of them is invalid.
    """
    images: list[bytes] = []
    read = [_message(message, images, tuning, param=f"messages.{index}") for index, message in enumerate(messages)]
    return read, images


def _message(message: ChatMessage, images: list[bytes], tuning: OpenAITuning, *, param: str) -> Message:
    """Return the message for the renderer; append its images to `images`."""
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
        if len(images) == tuning.max_images:
            raise ParameterError(where, f"{where}: more than {len(images)} images; leave out the oldest")
        parts.append(ImagePart(index=len(images)))
        images.append(
            read_image(part.image_url.url, param=where, max_bytes=tuning.max_image_bytes)
        )  # fmt: skip
    template_role: Any = "system" if role == "developer" else role
    calls: tuple[ToolCall, ...] = ()
    if message.tool_calls:
        calls = tuple(
            ToolCall(name=call.function.name, arguments=_arguments(call.function.arguments, f"{param}.tool_calls"))
            for call in message.tool_calls
        )
    return Message(role=template_role, parts=tuple(parts), tool_calls=calls)


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        value = read_json(text or "{}")
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise ParameterError(param, f"{param}: arguments = {text[:80]!r} is not a JSON object")
