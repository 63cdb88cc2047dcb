"""Tool calls in a policy's text, in the format of Hermes and Qwen. Pure.

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Invariant: nothing is lost. What looks like a call and is not one (no JSON, no name, no end) stays text.
"""

import dataclasses
import json
from typing import Any

from penstock.http.json_body import printable
from services.router.frontends.openai.stop import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A call as the policy wrote it."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallReader:
    """Tells text and calls of one answer apart while it is generated; white space around calls is dropped."""

    def __init__(self) -> None:
        """Nothing was generated yet."""
        self._held = ""
        self._opening = ""
        """Start of the unfinished block, with the white space before it; empty outside of blocks."""
        self._has_called = False

    def add(self, text: str) -> list[str | CallText]:
        """Take more text; return what is certain, in order."""
        self._held += text
        found: list[str | CallText] = []
        while True:
            before, mark, after = self._held.partition(CLOSE if self._opening else OPEN)
            if not mark:
                break
            self._held = after
            if self._opening:
                call = _read(before)
                found.append(call or self._trimmed(f"{self._opening}{before}{mark}"))
                self._has_called = call is not None
                self._opening = ""
            else:
                emitted = before.rstrip()
                found.append(self._trimmed(emitted))
                self._opening = before[len(emitted) :] + mark
        if not self._opening:
            num_held = held_back(self._held, OPEN)
            end = len(self._held[: len(self._held) - num_held].rstrip())
            found.append(self._trimmed(self._held[:end]))
            self._held = self._held[end:]
        return [each for each in found if each]

    def finish(self) -> list[str | CallText]:
        """Return what was held back; nothing follows."""
        rest = self._trimmed(self._opening + self._held)
        self._held = self._opening = ""
        return [rest] if rest else []

    def _trimmed(self, text: str) -> str:
        """The text, without the white space that follows a call."""
        if self._has_called:
            text = text.lstrip()
            self._has_called = not text
        return text


def arguments_json(arguments: dict[str, Any]) -> str:
    """The arguments as JSON for any encoding: lone surrogates, which escapes can spell, become U+FFFD.

    Raises:
        ValueError: they hold NaN or Infinity, which are not JSON.
    """
    return printable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _read(block: str) -> CallText | None:
    """The call that a block holds, if it holds one."""
    try:
        match json.loads(block):
            case {"name": str(name), "arguments": dict(arguments)} if name:
                return CallText(name=printable(name), arguments=arguments_json(arguments))
    except (ValueError, RecursionError):
        pass
    return None
