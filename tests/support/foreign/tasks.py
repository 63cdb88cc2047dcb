"""Tasks for environments of plain functions, and what they show."""

import io
from typing import Any

from PIL import Image

from penstock.environments import AssistantTurn, BlockingTask, Observation
from penstock.records import ImagePart, Message, TextPart, ToolCall, Verdict


def _no_grade(text: str) -> Verdict:
    raise AssertionError(f"asked to grade {text!r}")


def task(**fields: Any) -> BlockingTask:
    """A task whose gold answer is 3, and whose verdict nobody may ask for."""
    shown = tuple(ImagePart(index=index) for index in range(len(fields.get("images", ()))))
    question = Message(role="user", parts=(*shown, TextPart(text="Guess.")))
    return BlockingTask(
        **{"id": "run/0/0/e/0", "seed": 1, "messages": (question,), "golds": ("3",), "grade": _no_grade, **fields}
    )


def say(text: str, *calls: tuple[str, dict[str, Any]]) -> AssistantTurn:
    """A turn of the policy."""
    made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
    return AssistantTurn(text=text, content=text, calls=made)


def shown(observation: Observation | None) -> list[tuple[str, list[str]]]:
    """Role and parts of each message; an image as its size and first pixel."""
    assert observation is not None
    return [
        (
            message.role,
            [
                part.text if isinstance(part, TextPart) else _describe(observation.images[part.index])
                for part in message.parts
            ],
        )
        for message in observation.messages
    ]


def _describe(image: bytes) -> str:
    opened = Image.open(io.BytesIO(image))
    return f"{opened.format} {opened.size} {opened.getpixel((0, 0))}"
