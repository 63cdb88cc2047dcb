"""Messages between the server and its workers: frames over a socket pair."""

import re

import msgspec

from penstock.verdict_status import Status
from services.reward.verdict import Method

_SURROGATE = re.compile("[\ud800-\udfff]")


class SymbolicGold(msgspec.Struct, frozen=True, kw_only=True):
    """A gold answer that was decided neither by text nor by exact value."""

    text: str
    use_text: bool
    """Compare with the answer's whole text (an equation), not with its body."""
    value: str
    """Its exact value as a fraction, if it is a number; else empty."""
    tolerance: str
    """Largest right difference from `value`, as a fraction."""
    decimal_figures: int = 0
    """An irrational gold number accepts its decimal, rounded to at least this many significant figures; 0: never."""


class SymbolicTask(msgspec.Struct, frozen=True, kw_only=True, tag="symbolic"):
    """An answer to compare with gold answers; one match suffices."""

    golds: tuple[SymbolicGold, ...]
    body: str
    """The answer without its name."""
    text: str
    """The whole answer."""


class Prm800kTask(msgspec.Struct, frozen=True, kw_only=True, tag="prm800k"):
    """An answer to grade against gold answers as prm800k does; one match suffices."""

    golds: tuple[str, ...]
    answer: str


class MathVerifyTask(msgspec.Struct, frozen=True, kw_only=True, tag="math_verify"):
    """A response to verify by math-verify's own extraction and comparison; one match suffices."""

    golds: tuple[str, ...]
    response: str


class FormatTask(msgspec.Struct, frozen=True, kw_only=True, tag="format"):
    """A text to match, all of it, with a regular expression."""

    pattern: str
    text: str


class VerifierTask(msgspec.Struct, frozen=True, kw_only=True, tag="verifier"):
    """A response to verify by a custom verifier."""

    verifier: str
    """Its name."""
    golds: tuple[str, ...]
    response: str
    prompt: str


Task = SymbolicTask | Prm800kTask | MathVerifyTask | FormatTask | VerifierTask
"""All tasks of workers; a union of tagged structs."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The forkserver's settings for its workers."""

    memory_limit_bytes: int
    """Address space that a worker may take beyond what it has when it is forked."""
    verifiers: dict[str, str] = {}
    """Custom verifiers by name, loaded before any worker is forked: "file.py:function" or "module:function"."""


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To a worker: one item and the processor time that it may take."""

    task: Task
    cpu_limit_s: int
    token: int
    """Unguessable; a reply without it does not belong to this request."""


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker: its finding."""

    status: Status
    credit: float = 0.0
    extracted: str = ""
    """The answer that it verified, if it found the answer itself."""
    method: Method = Method.UNSPECIFIED
    detail: str = ""
    """What failed, if the status is FAILED."""
    token: int = 0
    """The request's token."""
    is_spoilt: bool = False
    """Whether the worker ends with this reply: it ran out of memory, has grown, left threads behind, or has
    less processor time than before."""


def sendable(text: str) -> str:
    """Return `text` with U+FFFD for lone surrogates, which no record can carry."""
    return _SURROGATE.sub("\ufffd", text)
