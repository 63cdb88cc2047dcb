"""Tasks and turns for tests of tool environments."""

from typing import Any

from penstock.environments import AssistantTurn, Observation, Task
from penstock.records import ImagePart, Message, TextPart, ToolCall, Verdict


async def _no_grade(text: str) -> Verdict:
    raise AssertionError(f"asked to grade {text!r}")


def task(**fields: Any) -> Task:
    """A task whose verdict nobody may ask for."""
    question = Message(
        role="user",
        parts=(*(ImagePart(index=index) for index in range(len(fields.get("images", ())))), TextPart(text="?")),
    )
    return Task(**{"id": "run/0/0/e/0", "seed": 1, "messages": (question,), "grade": _no_grade, **fields})


def turn(*calls: tuple[str, dict[str, Any]], text: str = "") -> AssistantTurn:
    """A turn that makes these calls."""
    made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
    return AssistantTurn(text=text, content=text, calls=made)


def texts(observation: Observation | None) -> list[str]:
    """The text of each message."""
    assert observation is not None
    return [
        "".join(part.text for part in message.parts if isinstance(part, TextPart)) for message in observation.messages
    ]
