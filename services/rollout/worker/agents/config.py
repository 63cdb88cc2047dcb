"""Configuration of agents: `[worker.agents]` of a recipe."""

from typing import Self

import pydantic

from penstock.config import Config
from penstock.config.http_url import is_http_url


class AgentConfig(Config):
    """The location of an agent's runner. Set exactly one of these."""

    function: str = ""
    """Python, in the worker's process: "package.module:function", a coroutine function or one that may block."""
    command: tuple[str, ...] = ()
    """A program for each sample: it reads one JSON object from its input and writes one to its output."""
    url: str = ""
    """http(s) URL of a service: one POST for each sample, with the same JSON objects."""

    @pydantic.model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in ("function", "command", "url") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"set exactly one of function, command and url, not {given or 'none'}")
        if self.url and not is_http_url(self.url):
            raise ValueError(f"url = {self.url!r} must be http://host:port/path or https://host:port/path")
        return self
