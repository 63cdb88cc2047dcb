"""Configuration: frozen pydantic models read from one TOML recipe, with `--section.key=value` overrides.

Every process of a run reads the same recipe, so that a mistyped key fails everywhere alike and before anything starts.
A service's own section is defined beside the service; the sections that several share are here.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

import pydantic
import tomli_w

from penstock.errors import ConfigError


class Config(pydantic.BaseModel):
    """Base of all configuration: immutable, without unknown keys; field docstrings are the help text."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class RunConfig(Config):
    """What names a run and where it keeps its files."""

    name: str = pydantic.Field(default="run", pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the run: letters, digits, '_' and '-'. It is also the prefix of everything the run keeps in NATS."""
    dir: Path = Path("runs")
    """Folder in which the run's own folder is made."""
    folder: Path | None = None
    """The run's own folder. `penstock train` fills it in: <dir>/<name>-<start>; by hand it is <dir>/<name>."""
    seed: int = 0
    """Seed of everything that is drawn at random outside the engines."""


class BusConfig(Config):
    """Where NATS is and how it is used."""

    url: str = ""
    """NATS server, for example nats://127.0.0.1:4222. Empty: `penstock train` starts one of its own."""
    connect_timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """How long to wait for the first connection."""
    lease_ttl_s: float = pydantic.Field(default=5.0, ge=1.0)
    """A replica or trainer whose lease was not renewed for so long counts as dead. Renewed three times as often."""
    ack_wait_s: float = pydantic.Field(default=10.0, ge=1.0)
    """A worker that gave no sign of life for so long loses its prompt group to another."""
    max_deliveries: int = pydantic.Field(default=20, ge=1)
    """After so many failed tries a prompt group is given up and reported to the trainer as failed."""

    @pydantic.model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        # Of the whole section, and before anything else, so that no message shows the URL.
        if "@" in self.url:
            raise ValueError("url holds a secret, which would be written down with the recipe; set PENSTOCK_NATS_TOKEN")
        return self


class SecurityConfig(Config):
    """TLS of every gRPC, HTTP and NATS connection. Tokens are not here: they come from the environment alone."""

    tls_cert: Path | None = None
    """This process's certificate and those between it and the authority's (PEM). It or tls_ca switches TLS on."""
    tls_key: Path | None = None
    """The certificate's key (PEM, without a passphrase)."""
    tls_ca: Path | None = None
    """Certificates of the authorities that servers, and with `mutual` clients, are checked against (PEM).
    None: servers are checked against the public authorities."""
    tls_server_name: str = ""
    """The name that every server's certificate holds, for servers under names that no certificate can know beforehand,
    as scaled containers are. Empty: a certificate has to hold the name under which its server is reached."""
    mutual: bool = False
    """Servers take only callers that have a certificate of tls_ca's, too."""

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_key", "tls_cert") if self.tls_cert is None else ("tls_cert", "tls_key")
            raise ValueError(f"{given} is given and {missing} is not; a certificate and its key go together")
        if self.mutual and (self.tls_cert is None or self.tls_ca is None):
            raise ValueError("mutual = true needs tls_cert, tls_key and tls_ca; give all three")
        if self.tls_server_name and self.tls_ca is None:
            raise ValueError(
                f"tls_server_name = {self.tls_server_name!r} needs tls_ca, the authority that answers for the name; "
                "give both or neither"
            )
        return self


class ModelConfig(Config):
    """The model that is trained."""

    path: Path
    """Folder with the checkpoint, tokenizer, processor and chat template, in the layout of transformers."""

    @pydantic.field_validator("path")
    @classmethod
    def _exists(cls, path: Path) -> Path:
        if not (path / "config.json").is_file():
            raise ValueError("holds no config.json; give the folder of a transformers checkpoint")
        return path


class SamplingConfig(Config):
    """How the policy is sampled. The trainer computes its logprobs at the same temperature."""

    temperature: float = pydantic.Field(default=1.0, gt=0, le=100)
    """Divides the logits. Greedy decoding (0) has no logprobs that a policy gradient could use."""
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution. Training refuses less: its logprobs assume 1."""
    top_k: int = pydantic.Field(default=-1, ge=-1)
    """Sample from this many of the likeliest tokens; -1 means all. Training refuses anything else."""
    max_new_tokens: int = pydantic.Field(default=512, ge=1)
    """Most tokens of one turn."""

    def require_trainable(self) -> None:
        """Refuse a distribution that the trainer cannot reproduce.

        Engines report logprobs before top_p and top_k cut the distribution, as the trainer computes them. With a cut,
        these are not the probabilities with which tokens were drawn, and every importance ratio would be wrong.

        Raises:
            ConfigError: top_p or top_k cuts it.
        """
        if self.top_p < 1:
            raise ConfigError(f"sampling.top_p = {self.top_p} cannot be trained on; set 1 (all of the distribution)")
        if self.top_k > 0:
            raise ConfigError(f"sampling.top_k = {self.top_k} cannot be trained on; set -1 (all of the distribution)")


class LogConfig(Config):
    """What is logged and how."""

    level: str = pydantic.Field(default="info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    format: str = pydantic.Field(default="auto", pattern="^(auto|console|json)$")
    """console, json, or auto: console on a terminal, else JSON."""


ConfigT = TypeVar("ConfigT", bound=Config)


def load(model: type[ConfigT], path: Path | None, overrides: Iterable[str] = ()) -> ConfigT:
    """Read `path` (TOML; None: all defaults), apply `overrides` in order and validate.

    Args:
        model: The model of the whole file.
        path: The recipe.
        overrides: `--a.b=c` each; c is read as a TOML value, and as a string where it is none.

    Raises:
        ConfigError: naming each key that is wrong, its value and what would be right.
    """
    tree = {} if path is None else _read(path)
    texts = dict(_apply_override(tree, override) for override in overrides)
    try:
        try:
            return model.model_validate(tree)
        except pydantic.ValidationError as error:
            # Only now is it known where text is wanted: there --run.name=2026 means "2026".
            _take_as_text(tree, texts, error)
            return model.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_explain(model, detail) for detail in error.errors())) from None


def dump(config: Config) -> str:
    """The whole of `config` as TOML, which `load` reads back to the same; what is None is left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}; give the path of a .toml file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path} is not TOML: it is not UTF-8 text; give the path of a .toml file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not TOML: {error}") from None


def _apply_override(tree: dict[str, Any], override: str) -> tuple[tuple[str, ...], str]:
    """Put the override's value into `tree`; return its key's parts and its text."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or "." not in key or "" in key.removeprefix("--").split("."):
        raise ConfigError(f"argument {override!r} is not an override; write --section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"argument {override!r}: {section} is a value, not a section")
    node[leaf] = value
    return (*sections, leaf), text


def _take_as_text(tree: dict[str, Any], texts: dict[tuple[str, ...], str], error: pydantic.ValidationError) -> None:
    for detail in error.errors():
        if detail["type"] == "string_type" and detail["loc"] in texts:
            *sections, leaf = (str(part) for part in detail["loc"])
            node = tree
            for section in sections:
                node = node[section]
            node[leaf] = texts[(*sections, leaf)]


def _explain(model: type[Config], detail: Any) -> str:
    """One validation error as `section.key = value: what is wrong`."""
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = _known_keys(model, detail["loc"][:-1])
        return f"unknown key {location}; known here: {', '.join(known)}"
    if detail["type"] == "missing" and (keys := _known_keys(model, detail["loc"])):
        key = f"{location}.{keys[0]}"
        return f"section [{location}] is missing; add it to the recipe that --config names, or give --{key}=..."
    if detail["type"] == "missing":
        return f"key {location} is missing; add it to the recipe or give --{location}=..."
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], dict):
        return f"{location}: {message}"
    return f"{location} = {str(detail['input'])!r}: {message}"


def _known_keys(model: type[Config], section: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in section:
        field = current.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Config)):
            return []
        current = field.annotation
    return sorted(current.model_fields)
