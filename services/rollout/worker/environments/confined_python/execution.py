"""Runs code and reports its output, its last value and its errors, all bounded. In the confined process.

This module does not protect from the code; the process does. Code that reaches in can only forge its own output.
"""

import ast
import errno
import io
import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

from services.rollout.worker.environments.confined_python.messages import Finished, Printed, Report

_FILE = "<python>"
_MAX_FRAMES = 5
_REFUSED = "(Code has no network, no files and no other processes here.)"


class _NoFurtherImports:
    """Replaces Python's finders: modules are files, and no file can be opened."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = ", ".join(sorted({name.partition(".")[0] for name in modules if not name.startswith("_")}))

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Refuse with an explanation."""
        raise ModuleNotFoundError(f"{name} cannot be imported here; these can: {self._modules}", name=name)


class _Printer(io.TextIOBase):
    """Standard output: reports text at once, up to a limit."""

    def __init__(self, report: Callable[[Report], None], max_characters: int) -> None:
        self._report = report
        self._room = max_characters
        self.num_dropped = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Report the part that fits."""
        kept = text[: self._room]
        if kept:
            self._room -= len(kept)
            self._report(Printed(text=_sendable(kept)))
        self.num_dropped += len(text) - len(kept)
        return len(text)


def run(source: str, *, max_characters: int, modules: Sequence[str], report: Callable[[Report], None]) -> None:
    """Run `source` as a separate program and report; the last report is `Finished`."""
    printer = _Printer(report, max_characters)
    sys.stdout = sys.stderr = printer
    sys.meta_path[:] = [_NoFurtherImports(modules)]
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    value, error = "", ""
    try:
        body, last = _compile(source)
        namespace: dict[str, object] = {"__name__": "__main__"}
        exec(body, namespace)
        shown = eval(last, namespace) if last is not None else None
        value = "" if shown is None else _cut(repr(shown), max_characters)
    except SystemExit as end:
        error = "" if end.code in (None, 0) else f"SystemExit: {end.code}"
    except BaseException as failure:  # noqa: BLE001 - the process's boundary: whatever code may raise
        error = _describe(failure)
    report(Finished(value=_sendable(value), error=_sendable(error[-max_characters:]), num_dropped=printer.num_dropped))


def _compile(source: str) -> tuple[CodeType, CodeType | None]:
    """Compile the program, and separately its last line if that is an expression."""
    tree = ast.parse(source, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = compile(tree, _FILE, "exec")
    return body, compile(ast.Expression(last.value), _FILE, "eval") if isinstance(last, ast.Expr) else None


def _describe(failure: BaseException) -> str:
    """Return the traceback, from the code's own first line on."""
    if isinstance(failure, MemoryError):
        return "MemoryError: the code needs more memory than it may have"
    entry: TracebackType | None = failure.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != _FILE:
        entry = entry.tb_next
    described = traceback.TracebackException(type(failure), failure, entry, limit=-_MAX_FRAMES)
    described.stack[:] = [frame for frame in described.stack if frame.filename != __file__]
    text = "".join(described.format()).strip()
    is_refused = isinstance(failure, PermissionError) and failure.errno == errno.EPERM
    return f"{text}\n{_REFUSED}" if is_refused else text


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} characters more)"


def _sendable(text: str) -> str:
    """Replace lone surrogates, which no record can carry, with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
