"""Where environments come from and where they run: the tables of `[worker.environments]`, and their server."""

import dataclasses
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, Final, Self, TypeAlias

import pydantic

from penstock.config import Config, MetricsConfig, NetworkConfig, RunConfig
from penstock.config.http_url import is_http_url
from penstock.names import SINGLE_TURN

MAX_PROCESSES = 128
"""Maximum processes of episodes at once: as many as `worker.concurrency` groups of eight have by default."""
ENTRY_POINT_GROUP: Final = "penstock.environments"
BUILT_IN: Final[Mapping[str, str]] = {
    "geo3k_tools": "services.rollout.worker.environments.geo3k_tools:Geo3kTools",
    "calculator": "services.rollout.worker.environments.calculator:Calculator",
    "geo3k_zoom": "services.rollout.worker.environments.geo3k_zoom:Geo3kZoom",
    "python": "services.rollout.worker.environments.python:Python",
    SINGLE_TURN: "services.rollout.worker.environments.single_turn:SingleTurn",
}
"""Classes that come with Penstock, by name."""


class EnvironmentConfig(Config):
    """An environment under the name used by rows of data: your own class, an installed one, or one behind a URL. A text
    in place of the table is its class."""

    model_config = pydantic.ConfigDict(serialize_by_alias=True)

    class_: str = pydantic.Field(default="", alias="class")
    """"package.module:Class". Empty: the environment that is installed or built in under this name."""
    args: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Keyword arguments of the class."""
    isolated: bool = False
    """Run each episode in its own process, even if the class is async. A class of plain functions always does."""
    url: str = ""
    """http:// or https:// address of a server of environments, in place of a class. It has no user and password: the
    server gets `PENSTOCK_ENVIRONMENT_TOKEN`."""
    name: str = ""
    """The environment's name at that server. Empty: the same name as here."""

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


def installed_environments() -> dict[str, str]:
    """Return the classes of installed packages, by name. Nothing is imported."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def environment_names(configured: Iterable[str]) -> list[str]:
    """Return the names of all environments: built in, installed, and those of `[worker.environments]`."""
    return list(dict.fromkeys((*BUILT_IN, *installed_environments(), *configured)))


def _check_url(url: str) -> None:
    # The message shows no part of the URL, which may hold a secret.
    if not is_http_url(url) or any(mark in url for mark in "@?#"):
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
    """A server of environments for workers on other machines, whose tables hold its url."""

    names: tuple[str, ...] = ()
    """The served environments. Empty: all of `[worker.environments]` without a url."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    max_episodes: int = pydantic.Field(default=1024, ge=1)
    """Episodes that live at once; workers of further episodes wait."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentServerSettings:
    """Everything that a server of environments receives."""

    server: EnvironmentServerConfig
    environments: Mapping[str, EnvironmentConfig]
    max_processes: int
    """Maximum processes of episodes at once."""
    run: RunConfig
    network: NetworkConfig
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
