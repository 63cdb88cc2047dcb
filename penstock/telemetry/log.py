"""Logging: structlog events named `noun.past_verb`, with values as keys that carry units.

Each line names its service and run, and the policy version of the weights that its process holds. A worker's lines also
name the group that it plays, and a trainer's lines the group that it takes. An event about another version gives that
version itself. What happens to every group is in the spans, not in the log.
"""

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from penstock.config import LogConfig

_bound: dict[str, Any] = {}
"""What every line of this process names, whatever its task or thread."""
_files: list[TextIO] = []
"""To which this process logs."""


class _Unfailing:
    """A stream whose reader may leave, or that is closed: output is then dropped; a log must not end its process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(config: LogConfig, *, service: str, run: str | None = None, file: Path | None = None) -> None:
    """Send this process's log to standard error, or append it to `file`; lines name `service`, and `run` if given.

    Libraries log from `warning` up.
    """
    stream = sys.stderr if file is None else file.open("a", buffering=1, errors="backslashreplace")
    if file is not None:
        _files.append(stream)
    as_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    if as_json:
        renderer: Any = structlog.processors.JSONRenderer()
    else:  # structlog's own tracebacks show variables, which may hold a token, and take seconds
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_bound,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=lambda *_: structlog.WriteLogger(cast("TextIO", _Unfailing(stream))),
        cache_logger_on_first_use=True,
    )
    _bound.clear()
    bind(service=service, **({} if run is None else {"run": run}))
    output = cast("TextIO", _Unfailing(stream))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=output)


def close_file() -> None:
    """Close what `configure` has opened; what is logged to it later is dropped."""
    while _files:
        with contextlib.suppress(OSError):  # a full disk: it flushes what could not be written before
            _files.pop().close()


def bind(**values: Any) -> None:
    """Have every line of this process name these values from now on; an event's own value of that key comes before."""
    _bound.update(values)


def _add_bound(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**event, **{key: value for key, value in _bound.items() if key not in event}}
