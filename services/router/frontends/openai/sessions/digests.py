"""Digests of conversations, by which a session recognises its earlier answers. Pure.

Two messages are equal if they say the same: text parts are joined, white space around an assistant's text does not
count, a call's arguments are compared as JSON values, and images by their content hash. Ids of calls do not count.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.records import ImagePart, Message


def digest_start(tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> str:
    """Digest a conversation before its first message: what the chat template shows besides messages."""
    return _digest("", [list(tools), dict(template_kwargs)])


def digest_next(before: str, message: Message, images: Sequence[str] = ()) -> str:
    """Digest a conversation with one more message.

    Args:
        before: The digest of the conversation so far; empty for a message alone.
        message: The next message.
        images: Content hashes of the conversation's images, which the message's image parts number.
    """
    content: list[Any] = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            content.append({"image": images[part.index]})
        elif content and isinstance(content[-1], str):
            content[-1] += part.text
        else:
            content.append(part.text)
    if message.role == "assistant":
        content = [text for piece in content if (text := piece.strip() if isinstance(piece, str) else piece)]
    return _digest(before, [message.role, content, [[call.name, call.arguments] for call in message.tool_calls]])


def _digest(before: str, value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:32]
