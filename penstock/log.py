"""Logging: structlog events named `noun.past_verb`, with values as keys that carry units.

Context that holds for a whole task (run, group, policy version) is bound once with `structlog.contextvars`.
"""

import logging
import sys
from pathlib import Path

import structlog

from penstock.config import LogConfig


def configure(config: LogConfig, *, service: str, file: Path | None = None) -> None:
    """Send this process's log to standard error, or append it to `file`; every line names `service`.

    Libraries speak from `warning` up.
    """
    stream = sys.stderr if file is None else file.open("a", buffering=1)
    as_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=stream)
