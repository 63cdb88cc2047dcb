"""Where an environment comes from and where it runs: the tables of `[worker.environments]`, and their server."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias
from urllib.parse import urlsplit

import pydantic

from penstock.config import Config, NetworkConfig, RunConfig

MAX_PROCESSES = 128
"""Processes of episodes at once: as many as `worker.concurrency` groups of eight have by default."""


class EnvironmentConfig(Config):
    """An environment under the name that rows of data give: a class of yours, one that is installed already, or one
    behind a URL. A text in place of the table is its class."""

    model_config = pydantic.ConfigDict(serialize_by_alias=True)

    class_: str = pydantic.Field(default="", alias="class")
    """"package.module:Class". Empty: the environment that is installed or built in under this name."""
    args: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Keyword arguments of the class."""
    isolated: bool = False
    """Run each episode in a process of its own, also if the class is async. A class of plain functions always does."""
    url: str = ""
    """http:// or https:// address of a server of environments, in place of a class. No user and password in it:
    `PENSTOCK_ENVIRONMENT_TOKEN` is shown to it."""
    name: str = ""
    """What that server calls the environment. Empty: as it is called here."""

    @pydantic.model_validator(mode="after")
    def _is_one_of_class_and_url(self) -> Self:
        if self.url:
            _check_url(self.url)
            given = [key for key, value in (("class", self.class_), ("args", self.args)) if value]
            given += ["isolated"] if self.isolated else []
            if given:
                raise ValueError(f"{' and '.join(given)} cannot stand beside url; set them where the server runs")
        elif self.name:
            raise ValueError(f"name = {self.name!r} is what a server calls the environment, and needs its url; add it")
        return self


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_whole = False
    # The message shows no part of the URL, which may hold a secret.
    if not is_whole or "@" in url or parts.query or parts.fragment:
        raise ValueError(
            "url must be http://host:port or https://host:port, without user, password and query; a server that asks "
            "for a token is shown PENSTOCK_ENVIRONMENT_TOKEN"
        )


def _with_tables(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {name: {"class": value} if isinstance(value, str) else value for name, value in given.items()}


EnvironmentTables: TypeAlias = Annotated[
    dict[str, EnvironmentConfig],
    pydantic.BeforeValidator(_with_tables, json_schema_input_type=dict[str, str | EnvironmentConfig]),
]
"""Environments by name."""


class EnvironmentServerConfig(Config):
    """A server of environments for workers on other machines, whose tables name its url."""

    names: tuple[str, ...] = ()
    """The environments that are served. Empty: all of `[worker.environments]` that have no url."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port that it listens on; 0 takes any that is free."""
    max_episodes: int = pydantic.Field(default=1024, ge=1)
    """Episodes that live at once; the workers of further ones wait."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentServerSettings:
    """All that a server of environments receives."""

    server: EnvironmentServerConfig
    environments: Mapping[str, EnvironmentConfig]
    max_processes: int
    """Processes of episodes at once."""
    run: RunConfig
    network: NetworkConfig
