"""Rows of a data set to examples, the part of a prompt that comes from the data.

Invariant: the images that an example's messages refer to are exactly the images beside them, in order.
"""

from dataclasses import dataclass

from penstock.model.images import decode_image
from penstock.records import ImagePart, Message, TextPart

IMAGE_MARK = "<image>"
"""Stands for an image in a row's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, the same for every layout."""

    turns: tuple[tuple[str, str], ...]
    """Role and text of each message, with one `<image>` in the text per image."""
    images: tuple[bytes, ...]
    """Encoded images, in the order of the marks."""
    golds: tuple[str, ...]
    """Correct answers, any of which counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What a prompt takes from a data set."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]


def make_example(row: Row, *, prompt_suffix: str = "", system_prompt: str = "") -> Example:
    """Turn a row into messages.

    Args:
        row: The row.
        prompt_suffix: Appended to the last user message.
        system_prompt: Put first, unless empty.

    Raises:
        ValueError: the numbers of marks and images differ, or there is no user message.
        InvalidRequestError: an image cannot be decoded, or is too large.
    """
    num_marks = sum(text.count(IMAGE_MARK) for _, text in row.turns)
    if num_marks != len(row.images):
        raise ValueError(f"its text has {num_marks} {IMAGE_MARK}, but there are {len(row.images)} images")
    for number, data in enumerate(row.images):
        decode_image(data, field=f"image {number}")  # completely, as the engine will, so that truncated files are found
    last_user = max((i for i, (role, _) in enumerate(row.turns) if role == "user"), default=None)
    if last_user is None:
        raise ValueError("it has no user message")
    num_images = 0
    messages = [Message(role="system", parts=(TextPart(text=system_prompt),))] if system_prompt else []
    for turn, (role, text) in enumerate(row.turns):
        parts: list[TextPart | ImagePart] = []
        for number, piece in enumerate((text + prompt_suffix * (turn == last_user)).split(IMAGE_MARK)):
            if number > 0:
                parts.append(ImagePart(index=num_images))
                num_images += 1
            if piece:
                parts.append(TextPart(text=piece))
        messages.append(Message(role=role, parts=tuple(parts)))  # type: ignore[arg-type]  # checked by the reader
    return Example(messages=tuple(messages), images=row.images, golds=row.golds)
