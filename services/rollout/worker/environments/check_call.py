"""Finds the call of the checking tool that counts in a turn. Pure.

The last call counts, as in slime, so that a policy may change its mind within a turn and has one check per turn.
"""

import dataclasses
import json
import re
from typing import Any, Literal, TypeAlias

from penstock.environments import AssistantTurn

TOOL_NAMES = ("calc_score", "calc_geo3k_reward")
"""Names of the checking tool: slime's, whose prompts use the first, and verl's."""

Kind: TypeAlias = Literal["check", "no_call", "malformed", "unsupported", "missing_answer"]

_BLOCK = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A block that counts in slime. An unclosed block reaches to the end of the next."""
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckCall:
    """The request that a turn makes."""

    kind: Kind
    """`check` if there is an answer to check."""
    name: str = ""
    """The tool that was called."""
    answer: str = ""
    """The answer to check."""


def read_call(turn: AssistantTurn) -> CheckCall:
    """Return the last readable call of `turn`. An answer is a text or a number."""
    if not turn.calls:
        return CheckCall(kind="malformed" if turn.malformed_calls else "no_call")
    call = turn.calls[-1]
    if call.name not in TOOL_NAMES:
        return CheckCall(kind="unsupported", name=call.name)
    answer = call.arguments.get("answer")
    text = str(answer).strip() if isinstance(answer, str | int | float) and not isinstance(answer, bool) else ""
    return CheckCall(kind="check" if text else "missing_answer", name=call.name, answer=text)


def read_call_as_slime(text: str) -> CheckCall:
    """Return the call that slime's environment sees in a turn's whole text, thoughts included.

    The name and the arguments may each stand at the top level or under `function`; arguments may be a JSON string; an
    answer may be any JSON value but null. Unreadable text is not a call, even where slime raises: arguments that are
    neither an object nor empty, a name or a `function` of another type.
    """
    blocks: list[str] = _BLOCK.findall(text)
    try:
        payload = _read_json(blocks[-1]) if blocks else {}
        function = payload.get("function", {})
        name = payload.get("name") or _member(function, "name")
        arguments = payload.get("arguments") or _member(function, "arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments) or {}
        if not name:
            return CheckCall(kind="no_call")
        name = _of_type(name, str).strip()
        if name not in TOOL_NAMES:
            return CheckCall(kind="unsupported", name=name)
        answer = _member(arguments or {}, "answer")
    except (ValueError, TypeError, RecursionError):
        return CheckCall(kind="no_call")
    given = "" if answer is None else str(answer).strip()
    return CheckCall(kind="check" if given else "missing_answer", name=name, answer=given)


def _read_json(block: str) -> Any:
    """Read strict JSON, as slime's parser does: integers beyond 64 bits are floats, and text is Unicode."""
    value = json.loads(block, parse_constant=_refuse, parse_int=_read_int, parse_float=_read_float)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _read_int(digits: str) -> int | float:
    value = int(digits)
    return value if _INT64_MIN <= value <= _UINT64_MAX else _read_float(digits)


def _read_float(digits: str) -> float:
    value = float(digits)
    return _refuse(digits) if value in (float("inf"), float("-inf")) else value


def _member(value: Any, key: str) -> Any:
    return _of_type(value, dict).get(key)


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
