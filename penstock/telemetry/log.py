"""Logging: structlog events named `noun.past_verb`, with values as keys that carry units.

Each line names its service. Events about a group, a version or a replica have it as a key.
"""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from penstock.config import LogConfig


class _Unfailing:
    """A stream whose reader may leave: output is then dropped, because a log must not end its process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure(config: LogConfig, *, service: str, run: str | None = None, file: Path | None = None) -> None:
    """Send this process's log to standard error, or append it to `file`; lines name `service`, and `run` if given.

    Libraries log from `warning` up.
    """
    stream = sys.stderr if file is None else file.open("a", buffering=1)
    as_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    if as_json:
        renderer: Any = structlog.processors.JSONRenderer()
    else:  # structlog's own tracebacks show variables, which may hold a token, and take seconds
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=lambda *_: structlog.WriteLogger(cast("TextIO", _Unfailing(stream))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, **({} if run is None else {"run": run}))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=stream)
