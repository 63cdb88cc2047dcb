"""Measures the text of requests before it is rendered or tokenised: how long that takes, and whether it can fit."""

import math
from collections.abc import Sequence
from typing import Any

from services.router.frontends.openai.schema.constraint import SchemaFormat
from services.router.frontends.openai.schema.messages import ImagePart, RefusalPart, TextPart, Tool
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest, GenerationRequest

LONG_BYTES = 2**16
"""Texts of this size or more take more than about 10 ms to parse."""
_IMAGE_CHARS_PER_BYTE = 16
"""Characters of base64 that take as long to decode and hash as a byte of text takes to render and tokenise."""
_ID_BYTES = 4
"""Bytes of text that an id counts as: it is checked and packed."""


def size_to_parse(body: ChatRequest) -> int:
    """Return the bytes of text that take as long to parse as a chat. What is not messages counts up to about
    `LONG_BYTES`."""
    num_bytes = size_of_chat(body) + size_of_tools(body.tools, most=LONG_BYTES) + _size_of_forms(body)
    num_bytes += _size_of_json(body.chat_template_kwargs, most=LONG_BYTES)
    for message in body.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, ImagePart):
                num_bytes += len(part.image_url.url) // _IMAGE_CHARS_PER_BYTE
    return num_bytes


def size_of_chat(body: ChatRequest) -> int:
    """Return the bytes of the messages' text, without images: a template prints all of it."""
    num_bytes = 0
    for message in body.messages:
        content: Sequence[Any] = message.content or ()
        parts = (content,) if isinstance(content, str) else content
        for part in parts:
            match part:
                case str():
                    num_bytes += size_of_text(part)
                case TextPart():
                    num_bytes += size_of_text(part.text)
                case RefusalPart():
                    num_bytes += size_of_text(part.refusal)
        for call in message.tool_calls:
            num_bytes += size_of_text(call.function.name) + size_of_text(call.function.arguments)
    return num_bytes


def size_of_tools(tools: Sequence[Tool], *, most: float = math.inf) -> int:
    """Return the bytes of the tools' text, as `_size_of_json` counts: a template prints it if it shows the tools."""
    functions = (tool.function for tool in tools)
    return _size_of_json([[each.name, each.description, each.parameters] for each in functions], most=most)


def size_of_completion(body: CompletionRequest) -> int:
    """Return the bytes of text that take as long to parse as the prompts; ids need no tokeniser, but are checked."""
    sizes = (size_of_text(each) if isinstance(each, str) else _ID_BYTES * len(each) for each in body.prompts)
    return sum(sizes) + _size_of_forms(body)


def size_of_text(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _size_of_forms(body: GenerationRequest) -> int:
    """Return the bytes of the forms that an answer must have, up to about `LONG_BYTES`."""
    forms: list[Any] = []
    if isinstance(body.response_format, SchemaFormat):
        forms.append(body.response_format.json_schema.schema_)
    if body.structured_outputs is not None:
        forms.append(dict(body.structured_outputs))
    return _size_of_json(forms, most=LONG_BYTES)


def _size_of_json(value: Any, *, most: float) -> int:
    """Return the bytes of a JSON value's texts, and one for each item of its lists and mappings, which is less than it
    takes as JSON. Stop counting at `most`: a whole body of small items takes seconds."""
    num_bytes, left = 0, [value]
    while left and num_bytes < most:
        match left.pop():
            case str() as text:
                num_bytes += size_of_text(text)
            case list() as items:
                num_bytes += len(items)
                left += items
            case dict() as items:
                num_bytes += len(items)
                left += items.keys()
                left += items.values()
    return num_bytes
