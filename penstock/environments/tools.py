"""Tools that a policy may call: a name, a JSON schema of the arguments, and the function that answers.

Invariant: whatever arguments a policy writes, `Tool.call` returns a result or raises `ToolError` with words for the
policy. Only a failure of Penstock's own servers passes through, because it says nothing about the call.
"""

import asyncio
import dataclasses
import functools
import inspect
import itertools
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import jsonschema
import structlog

from penstock.errors import InvalidRequestError, PenstockError
from penstock.runtime.own_thread import run_in_own_thread
from penstock.runtime.process import others_code

log = structlog.get_logger()

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MAX_MISTAKES = 3
_MAX_WORDS = 400
"""Characters of an error that the policy is shown; some errors quote the whole call."""


class ToolError(Exception):
    """A tool's objection to a call; the policy is shown its text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A tool's answer: text, then images; or both in any order."""

    text: str = ""
    images: tuple[bytes, ...] = ()
    """Encoded files: PNG, JPEG, WebP or GIF."""
    parts: tuple[str | bytes, ...] = ()
    """Texts and images in any order, in place of `text` and `images`."""

    def __post_init__(self) -> None:
        if self.parts and (self.text or self.images):
            raise ValueError("a ToolResult has parts, or text and images; put the text and the images into its parts")

    @property
    def content(self) -> tuple[str | bytes, ...]:
        """Texts and images in the order in which they are shown; never empty."""
        if self.parts:
            return self.parts
        return (self.text, *self.images) if self.text or not self.images else self.images

    def with_words(self, words: str) -> "ToolResult":
        """Return the same result with a line of text appended."""
        if self.parts:
            return dataclasses.replace(self, parts=(*self.parts, f"\n{words}"))
        return dataclasses.replace(self, text=f"{self.text}\n{words}".lstrip())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool."""

    name: str
    description: str
    """For the policy: the tool's effect, and when to call it."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, of type object."""
    function: Callable[..., object]
    """Gets the arguments by name. Async, or blocking, which then runs in its own thread; what it returns there may be
    awaitable. It returns a `ToolResult`, a text, or any JSON value, and raises `ToolError` with a text for the policy
    to reject a call."""
    timeout_s: float | None = 30.0
    """Seconds until an async function is cancelled. In a blocking one `SystemExit` is raised, which ends Python code at
    its next instruction but not a call that blocks in C. None for a function that enforces its own limit."""
    close: Callable[[], Awaitable[None]] | None = None
    """Releases the tool's resources; called once, when its episode ends."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r} must be 1 to 64 letters, digits, '_', '-' or '.'")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"tool {self.name}: timeout_s = {self.timeout_s} must be above 0, or None for no limit")
        try:
            jsonschema.Draft202012Validator.check_schema(self.parameters)
        except jsonschema.SchemaError as error:
            raise ValueError(f"tool {self.name}: parameters are not a JSON schema: {error.message}") from None
        if self.parameters.get("type") != "object":
            raise ValueError(f'tool {self.name}: parameters must be a JSON schema with "type": "object"')

    @classmethod
    def from_function(cls, function: Callable[..., object], *, timeout_s: float | None = 30.0) -> Self:
        """Return a tool from a typed function; the docstring describes the tool, and each argument under `Args:`.

        transformers' `get_json_schema` derives the schema, as in TRL: the same functions work in both.

        Raises:
            ValueError: a type or a description is missing.
        """
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:  # TypeHintParsingException, DocstringParsingException and others, by version
            raise ValueError(f"no schema can be derived from {function!r}: {error}") from error
        return cls(
            name=schema["name"],
            description=schema.get("description", ""),
            parameters={**_with_null(schema["parameters"]), "additionalProperties": False},
            function=function,
            timeout_s=timeout_s,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, for chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer a call.

        Raises:
            ToolError: the arguments do not fit, or the function failed or took too long; the message is for the policy.
            PenstockError: one of Penstock's servers failed.
        """
        if mistakes := self._find_mistakes(arguments):
            raise ToolError(f"the arguments do not fit: {mistakes}")
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self.function):
                    with others_code():
                        result = await self.function(**arguments)
                else:
                    result = await run_in_own_thread(functools.partial(self.function, **arguments), name="tool")
                    if inspect.isawaitable(result):
                        with others_code():
                            result = await result
            return _to_result(result)
        except InvalidRequestError as error:
            raise ToolError(shorten(str(error))) from error
        except (ToolError, PenstockError):
            raise
        except Exception as error:  # a boundary: tools are other people's code
            if limit.expired():
                raise ToolError(f"it took longer than {self.timeout_s:g} s and was ended") from None
            log.warning("tool.failed", tool=self.name, error=repr(error))
            raise ToolError(shorten(f"it failed: {type(error).__name__}: {error}")) from error

    def _find_mistakes(self, arguments: Mapping[str, Any]) -> str:
        if not _is_finite(arguments):
            return "NaN and infinity are no numbers of JSON"
        errors = itertools.islice(
            jsonschema.Draft202012Validator(self.parameters).iter_errors(arguments), _MAX_MISTAKES
        )
        found = [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
        return shorten("; ".join(found).replace("$: ", ""))


def shorten(text: str, limit: int = _MAX_WORDS) -> str:
    """Return `text`, or its first `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Add null to the types of the schema and its parts that are nullable: transformers writes OpenAPI's "nullable",
    which JSON schema lacks."""
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        match key, value:
            case (("nullable" | "description"), _):
                pass
            case (("items" | "additionalProperties"), Mapping()):
                plain[key] = _with_null(value)
            case (("anyOf" | "prefixItems"), list()):
                plain[key] = [*map(_with_null, value)]
            case "properties", Mapping():
                plain[key] = {name: _with_null(part) for name, part in value.items()}
            case _:
                plain[key] = value
    described = {key: schema[key] for key in ("description",) if key in schema}
    return {**({"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") else plain), **described}


def _is_finite(value: object) -> bool:
    """Return whether all numbers inside a JSON value are finite; Python's reader accepts NaN and Infinity."""
    todo = [value]
    while todo:
        match todo.pop():
            case float(number) if not math.isfinite(number):
                return False
            case list(items):
                todo += items
            case Mapping() as fields:
                todo += fields.values()
    return True


def _to_result(value: object) -> ToolResult:
    match value:
        case ToolResult():
            return value
        case str():
            return ToolResult(text=value)
        case None:
            return ToolResult()
    return ToolResult(text=json.dumps(value, ensure_ascii=False))
