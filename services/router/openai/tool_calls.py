"""Calls of tools in a policy's text, in the form of Hermes and Qwen. Pure.

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Invariant: nothing is lost. What looks like a call and is none (no JSON, no name, no end) is given as the text that it
is.
"""

import dataclasses
import json

from services.router.openai.stop import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A call as the policy wrote it."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallReader:
    """Tells text and calls of one answer apart, while it comes; white space around calls is dropped."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._held = ""
        self._is_inside = False
        self._has_called = False

    def add(self, text: str) -> list[str | CallText]:
        """Take more text; return what is certain by now, in its order."""
        self._held += text
        found: list[str | CallText] = []
        while True:
            before, mark, after = self._held.partition(CLOSE if self._is_inside else OPEN)
            if not mark:
                break
            self._held = after
            if self._is_inside:
                found.append(_read(before) or f"{OPEN}{before}{CLOSE}")
                self._has_called = isinstance(found[-1], CallText)
            else:
                found.append(self._trimmed(before.rstrip()))
            self._is_inside = not self._is_inside
        if not self._is_inside:
            num_held = held_back(self._held, OPEN)
            end = len(self._held[: len(self._held) - num_held].rstrip())
            found.append(self._trimmed(self._held[:end]))
            self._held = self._held[end:]
        return [each for each in found if each]

    def finish(self) -> list[str | CallText]:
        """What was held back, now that nothing follows."""
        rest = OPEN + self._held if self._is_inside else self._trimmed(self._held)
        self._held, self._is_inside = "", False
        return [rest] if rest else []

    def _trimmed(self, text: str) -> str:
        """The text, without the white space that follows a call."""
        if self._has_called:
            text = text.lstrip()
            self._has_called = not text
        return text


def _read(block: str) -> CallText | None:
    """The call that a block holds, if it is one."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return CallText(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return None
