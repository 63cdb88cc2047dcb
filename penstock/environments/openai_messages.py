"""Writes conversations in OpenAI's form for other people's code, and reads them from its answers.

Invariant: `read_messages` reads back exactly what `write_messages` wrote, including the bytes of images.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args, get_type_hints

from penstock.environments.pictures import read_picture
from penstock.environments.protocol import Observation
from penstock.errors import EnvironmentFailedError
from penstock.records import ImagePart, Message, TextPart, ToolCall

_MAGIC: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_ROLES: Final = get_args(get_type_hints(Message)["role"])


def write_messages(messages: Sequence[Message], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return messages as clients of OpenAI's API send them, with images inline as data: URLs.

    A message's content is a text, or a list of parts if it shows an image.
    """
    return [_write(message, images) for message in messages]


def read_messages(messages: object, where: str) -> Observation:
    """Return an observation from messages: a list of mappings with `role` and `content`, a text or a list of parts.

    Parts are texts, {"type": "text", "text": ...}, {"type": "image", "image": ...} and {"type": "image_url",
    "image_url": ...}; pictures are read by `read_picture`.

    Args:
        messages: The list.
        where: What to call it in an error, such as "observations of my_env.MyEnv.step".

    Raises:
        EnvironmentFailedError: it is not such a list. The message names the place, the value and the remedy.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise EnvironmentFailedError(
            f'{where} = {_show(messages)} must be a list of messages; return [{{"role": "user", "content": ...}}]'
        )
    images: list[bytes] = []
    read = tuple(_read(message, f"{where}[{number}]", images) for number, message in enumerate(messages))
    return Observation(messages=read, images=tuple(images))


def read_parts(content: object, where: str) -> tuple[str | bytes, ...]:
    """Return a message's content as texts and the bytes of pictures, in order.

    Raises:
        EnvironmentFailedError: as in `read_messages`.
    """
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise EnvironmentFailedError(f"{where} = {_show(content)} must be a text or a list of parts")
    return tuple(_read_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _write(message: Message, images: Sequence[bytes]) -> dict[str, Any]:
    has_text_alone = all(isinstance(part, TextPart) for part in message.parts)
    content: Any = [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": _data_url(images[part.index])}}
        for part in message.parts
    ]
    if has_text_alone:
        content = "".join(part["text"] for part in content)
    written: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return written


def _data_url(image: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _read(message: object, where: str, images: list[bytes]) -> Message:
    if not isinstance(message, Mapping):
        raise EnvironmentFailedError(f"{where} = {_show(message)} must be a message, a dict with role and content")
    role: Any = message.get("role")
    if role not in _ROLES:
        raise EnvironmentFailedError(f"{where}.role = {_show(role)} must be one of {', '.join(_ROLES)}")
    parts: list[TextPart | ImagePart] = []
    for part in read_parts(message.get("content"), f"{where}.content"):
        if isinstance(part, str):
            parts.append(TextPart(text=part))
        else:
            parts.append(ImagePart(index=len(images)))
            images.append(part)
    calls = message.get("tool_calls") or ()
    read = tuple(_read_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls))
    if read and role != "assistant":
        raise EnvironmentFailedError(f"{where} of role {role} has tool_calls; only the assistant's messages may")
    return Message(role=role, parts=tuple(parts), tool_calls=read)


def _read_part(part: object, where: str) -> str | bytes:
    match part:
        case str():
            return part
        case {"type": "text", "text": str() as text}:
            return text
        case {"type": "image_url", "image_url": picture}:
            return read_picture(picture, f"{where}.image_url")
        case {"type": "image", "image": picture} if picture is not None:
            return read_picture(picture, f"{where}.image")
        case {"type": "image", "url": picture}:
            return read_picture(picture, f"{where}.url")
    raise EnvironmentFailedError(
        f'{where} = {_show(part)} is no part that can be shown; write {{"type": "text", "text": ...}}, {{"type": '
        '"image", "image": ...} or {"type": "image_url", "image_url": {"url": ...}}'
    )


def _read_call(call: object, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    match function:
        case {"name": str() as name, "arguments": str() | Mapping() as arguments}:
            try:
                values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            except ValueError:
                values = None
            if isinstance(values, dict):
                return ToolCall(name=name, arguments=values)
    raise EnvironmentFailedError(
        f'{where} = {_show(call)} is no call; write {{"function": {{"name": ..., "arguments": {{...}}}}}}'
    )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
