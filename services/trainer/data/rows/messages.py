"""Reads prompts, in the forms found in data sets, as messages with their images.

    "<image>Find x."
    [{"role": "user", "content": "<image>Find x."}]
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ...}}, {"type": "text", "text": ...}]}]
    [{"from": "human", "value": "<image>Find x."}]

Invariant: each image of a row has exactly one place in its messages, in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

from penstock.records import ImagePart, Message, TextPart, ToolCall
from services.trainer.data.tool_calls import read_tool_calls

IMAGE_MARK = "<image>"
"""Placeholder for an image in a row's text."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_IMAGE_TYPES = ("image", "image_url", "input_image")
_IMAGE_KEYS = ("image_url", "image", "url")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_BOUND_KEYS = ("min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """The place of an image in a message."""

    cell: Any = None
    """The message's own image; None: the next image of the row's columns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message whose images have not been read."""

    role: Role
    pieces: tuple[str | ImageRef, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant's message."""


def read_turns(cell: Any) -> tuple[Turn, ...]:
    """Return the messages in a cell: text is one user message.

    Image parts determine where images are; the `<image>` that a text may have for each of them is removed.

    Raises:
        ValueError: it is neither text nor a list of messages.
    """
    match cell:
        case str():
            return _marked((Turn("user", (cell,)),))
        case [*messages] if messages:
            turns = tuple(_turn(message) for message in messages)
            num_parts = sum(isinstance(piece, ImageRef) for turn in turns for piece in turn.pieces)
            return _unmarked(turns, num_parts) if num_parts else _marked(turns)
    raise ValueError(f"{_kind(cell)}; want text, or a list of messages with role and content")


def read_demonstration(cell: Any) -> tuple[Turn, ...]:
    """Return the messages in a cell as `read_turns` does, if the assistant's can be learned as they are.

    Raises:
        ValueError: as for `read_turns`, or an assistant's message has thoughts beside its content, or a weight of 0.
    """
    turns = read_turns(cell)
    if not isinstance(cell, str):
        for number, (turn, message) in enumerate(zip(turns, cell, strict=True)):
            if turn.role == "assistant":
                _require_learnable(number, message, turn)
    return turns


def read_roles(cell: Any) -> tuple[str, ...]:
    """Return the roles of the messages in a cell; none if it is no list of messages."""
    messages = cell if isinstance(cell, list) else []
    roles = [message.get("role") or message.get("from") for message in messages if isinstance(message, Mapping)]
    return tuple(_SHAREGPT_ROLES.get(role, role) for role in roles if isinstance(role, str))


def read_completion(cell: Any) -> tuple[Turn, ...]:
    """Return the messages that follow a prompt: text is one message of the assistant's, and `<image>` in it is text.

    Raises:
        ValueError: it is neither text nor a list of messages, or `read_demonstration` refuses one of them.
    """
    match cell:
        case str():
            return (Turn("assistant", (cell,)),)
        case [*messages] if messages:
            return read_demonstration(cell)
    raise ValueError(
        f"{_kind(cell)}; want what the assistant says, as text or messages; for a bare answer set data.answer_format"
    )


def split_answer(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], str]:
    """Split a conversation that ends with the correct answer into the messages before it and the answer's text.

    Raises:
        ValueError: the last message is not the assistant's, or it has an image.
    """
    *before, last = turns
    if last.role != "assistant" or last.tool_calls or not all(isinstance(piece, str) for piece in last.pieces):
        raise ValueError("messages that end with no text of the assistant's, which would be the correct answer")
    return tuple(before), "".join(cast(Sequence[str], last.pieces))


def place_images(
    turns: Sequence[Turn], cells: Sequence[Any], *, images_first: bool = False
) -> tuple[tuple[Turn, ...], list[Any]]:
    """Give each reference its image.

    Args:
        turns: The messages.
        cells: The row's images that are not in the messages themselves.
        images_first: Put the images before the text of the first user message if the messages have no place for any.

    Returns:
        The messages, and the images in the order of their references.

    Raises:
        ValueError: the numbers of references and images differ.
    """
    refs = [piece for turn in turns for piece in turn.pieces if isinstance(piece, ImageRef)]
    num_open = sum(ref.cell is None for ref in refs)
    if num_open != len(cells):
        if not refs and images_first:
            return _at_the_start(turns, len(cells)), list(cells)
        hint = "" if refs else "; put them before the text with --data.images_first=true" if cells else ""
        raise ValueError(f"its text has {num_open} {IMAGE_MARK}, but there are {len(cells)} images{hint}")
    rest = iter(cells)
    return tuple(turns), [next(rest) if ref.cell is None else ref.cell for ref in refs]


def make_messages(
    turns: Sequence[Turn], *, prompt_suffix: str = "", system_prompt: str = "", is_demonstration: bool = False
) -> tuple[Message, ...]:
    """Turn a row's messages into those of its prompt, or of a demonstration.

    Args:
        turns: The row's messages.
        prompt_suffix: Appended to the last user message, in a demonstration to the last one that is answered.
        system_prompt: Put first, unless empty.
        is_demonstration: Whether the assistant's messages are present, to be learned.

    Raises:
        ValueError: chat templates would drop or reject one of the messages: there is no user message, or a system
            message that is not the first; a prompt ends with the assistant's message; or a demonstration has no
            assistant message, one with an image, or an empty message of the user's or the assistant's.
    """
    roles = [turn.role for turn in turns]
    if "user" not in roles:
        raise ValueError("it has no user message")
    if is_demonstration:
        _require_content(turns)
    elif roles[-1] == "assistant":
        raise ValueError("its last message is the assistant's; a prompt ends with a user's or a tool's")
    if "system" in roles[1:]:
        raise ValueError("it has a system message that is not the first; models read one, at the start")
    if system_prompt and roles[0] == "system":
        raise ValueError(
            "it has a system message, and data.system_prompt would be a second; leave the setting empty, or remove the "
            "row's"
        )
    asked = roles[: len(roles) - roles[::-1].index("assistant")] if is_demonstration else roles
    last_user = len(asked) - 1 - asked[::-1].index("user")
    num_images = 0
    messages = [Message(role="system", parts=(TextPart(text=system_prompt),))] if system_prompt else []
    for number, turn in enumerate(turns):
        parts: list[TextPart | ImagePart] = []
        for piece in (*turn.pieces, prompt_suffix) if number == last_user else turn.pieces:
            if isinstance(piece, ImageRef):
                parts.append(ImagePart(index=num_images))
                num_images += 1
            elif parts and isinstance(parts[-1], TextPart):
                parts[-1] = TextPart(text=parts[-1].text + piece)
            elif piece:
                parts.append(TextPart(text=piece))
        messages.append(Message(role=turn.role, parts=tuple(parts), tool_calls=turn.tool_calls))
    return tuple(messages)


def _require_content(turns: Sequence[Turn]) -> None:
    answers = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        raise ValueError("it has no assistant message, so there is nothing to learn")
    if "user" not in [turn.role for turn in turns[: answers[0]]]:
        raise ValueError("its assistant speaks before any user")
    for number, turn in enumerate(turns):
        has_image = any(isinstance(piece, ImageRef) for piece in turn.pieces)
        if has_image and turn.role == "assistant":
            raise ValueError(f"its message {number}, the assistant's, has an image; models answer with text")
        is_empty = not (has_image or turn.tool_calls or "".join(cast(Sequence[str], turn.pieces)).strip())
        if is_empty and turn.role in ("user", "assistant"):
            raise ValueError(f"its message {number}, the {turn.role}'s, is empty")


def _require_learnable(number: int, message: Mapping[str, Any], turn: Turn) -> None:
    text = "".join(piece for piece in turn.pieces if isinstance(piece, str))
    for key in _THOUGHT_KEYS:
        if (thought := message.get(key)) and str(thought).strip() not in text:
            raise ValueError(
                f"message {number}, the assistant's, with {key}, which would not be learned; put it into the content, "
                "between <think> and </think>"
            )
    if message.get("weight") == 0:
        raise ValueError(
            f"message {number}, the assistant's, with weight = 0, which would be learned; remove the message or the row"
        )


def _turn(message: Any) -> Turn:
    if isinstance(message, Mapping) and {"from", "value"} <= message.keys():  # ShareGPT's form
        speaker = message["from"]
        role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message = {"role": role, "content": message["value"]}
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise ValueError(f"a list with {_shown(message)}; want messages of role ({', '.join(_ROLES)}) and content")
    role = cast(Role, message["role"])
    calls = read_tool_calls(message.get("tool_calls"))
    if calls and role != "assistant":
        raise ValueError(f"a message of role {role} with tool_calls; only the assistant's may have them")
    match message.get("content"):
        case str(text):
            return Turn(role, (text,), calls)
        case [*parts]:
            return Turn(role, tuple(_piece(part) for part in parts), calls)
        case None if calls:
            return Turn(role, (), calls)
    raise ValueError(f"the message {_shown(message)}; want its content as text, or as a list of parts")


def _piece(part: Any) -> str | ImageRef:
    match part:
        case str(text) | {"type": "text" | "input_text", "text": str(text)}:
            return text
        case {"type": kind} if kind in _IMAGE_TYPES:
            return _image(part)
    raise ValueError(f"a message with the part {_shown(part)}; want type text, image or image_url")


def _image(part: Mapping[str, Any]) -> ImageRef:
    """Return the reference of a part; bounds beside the image of a part go before those in it."""
    image = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
    bounds = {key: part[key] for key in _BOUND_KEYS if part.get(key) is not None}
    if not bounds:
        return ImageRef(image)
    if image is None:
        raise ValueError(
            f"a message with the part {_shown(part)}, which bounds an image that it does not have; put "
            f"{' and '.join(bounds)} beside the image"
        )
    return ImageRef({**(image if isinstance(image, Mapping) else {"image": image}), **bounds})


def _marked(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the messages with a reference for each mark."""
    return tuple(replace(turn, pieces=tuple(_split(turn.pieces))) for turn in turns)


def _split(pieces: Sequence[str | ImageRef]) -> list[str | ImageRef]:
    found: list[str | ImageRef] = []
    for number, piece in enumerate("".join(cast(Sequence[str], pieces)).split(IMAGE_MARK)):
        found += [ImageRef()] * (number > 0) + [piece] * bool(piece)
    return found


def _unmarked(turns: tuple[Turn, ...], num_parts: int) -> tuple[Turn, ...]:
    num_marks = sum(piece.count(IMAGE_MARK) for turn in turns for piece in turn.pieces if isinstance(piece, str))
    if num_marks not in (0, num_parts):
        raise ValueError(
            f"its texts have {num_marks} {IMAGE_MARK} beside {num_parts} parts that are images; keep one of the two"
        )
    return tuple(
        replace(turn, pieces=tuple(p.replace(IMAGE_MARK, "") if isinstance(p, str) else p for p in turn.pieces))
        for turn in turns
    )


def _at_the_start(turns: Sequence[Turn], num_images: int) -> tuple[Turn, ...]:
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)
    return tuple(
        replace(turn, pieces=(*[ImageRef()] * num_images, *turn.pieces)) if number == first else turn
        for number, turn in enumerate(turns)
    )


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, Mapping) else _kind(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else "empty text" if value == "" else type(value).__name__
