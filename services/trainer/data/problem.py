"""A problem as a data set holds it, and as a prompt carries it.

Invariant: the images that a row's messages refer to are exactly the images beside them, in order.
"""

from dataclasses import dataclass

from penstock.model.images import decode_image
from penstock.records import ImagePart, Message, TextPart

IMAGE_MARK = "<image>"
"""Stands for an image in a problem's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of a data set, whatever layout it came in."""

    turns: tuple[tuple[str, str], ...]
    """Role and text of each message; the text has an `<image>` where an image belongs."""
    images: tuple[bytes, ...]
    """Encoded images, in the order of the marks."""
    golds: tuple[str, ...]
    """Correct answers, any of which counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContent:
    """What a prompt takes from a data set."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]


def make_content(problem: Problem, *, prompt_suffix: str = "", system_prompt: str = "") -> PromptContent:
    """Turn a problem into messages.

    Args:
        problem: The problem.
        prompt_suffix: Appended to the last user message.
        system_prompt: Put first, unless empty.

    Raises:
        ValueError: the text has not as many marks as there are images, or there is no user message.
        InvalidRequestError: an image cannot be decoded, or is too large.
    """
    num_marks = sum(text.count(IMAGE_MARK) for _, text in problem.turns)
    if num_marks != len(problem.images):
        raise ValueError(
            f"its text has {num_marks} {IMAGE_MARK} for {len(problem.images)} images; they must be as many"
        )
    for number, data in enumerate(problem.images):
        decode_image(data, field=f"image {number}")  # all of it, as the engine will: so a file cut short is found
    last_user = max((i for i, (role, _) in enumerate(problem.turns) if role == "user"), default=None)
    if last_user is None:
        raise ValueError("it has no user message")
    num_images = 0
    messages = [Message(role="system", parts=(TextPart(text=system_prompt),))] if system_prompt else []
    for place, (role, text) in enumerate(problem.turns):
        parts: list[TextPart | ImagePart] = []
        for number, piece in enumerate((text + prompt_suffix * (place == last_user)).split(IMAGE_MARK)):
            if number > 0:
                parts.append(ImagePart(index=num_images))
                num_images += 1
            if piece:
                parts.append(TextPart(text=piece))
        messages.append(Message(role=role, parts=tuple(parts)))  # type: ignore[arg-type]  # checked where it is read
    return PromptContent(messages=tuple(messages), images=problem.images, golds=problem.golds)
