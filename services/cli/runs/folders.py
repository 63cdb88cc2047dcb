"""The folders of runs, with what they say of their runs, whatever version of Penstock wrote them."""

import os
import stat
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from penstock.config import BusConfig, SecurityConfig
from penstock.errors import ConfigError
from penstock.weights.version_folders import belongs_to
from services.launch.run_folder import RunFolder
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOfRun:
    """A run folder, and where its run is on NATS."""

    folder: RunFolder
    run: str
    """The recipe's run.name; empty if the recipe cannot be read."""
    bus: BusConfig
    """Without a URL if the run has a nats-server of its own, whose store is in the folder."""
    security: SecurityConfig
    weight_files: Path | None = None
    """The folder of its weight files in `trainer.weight_sync.files_dir`; None: it has none there."""

    @property
    def size_bytes(self) -> int:
        """Size of all files. Those of a live run may go while they are looked at."""
        total = 0
        for folder, _, names in os.walk(self.folder.path):
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.lstat(os.path.join(folder, name))
                    total += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return total

    @property
    def started_at(self) -> float:
        """When the recipe was written, in seconds since 1970."""
        return self.folder.config_file.stat().st_mtime


def is_run_folder(path: Path) -> bool:
    """Return whether Penstock has run in the folder at `path`.

    A config.toml alone may be another program's, or a recipe that a person wrote. That of a run has the run's name.
    Beside it is the lock that a launcher left, or, from a trainer without a launcher, the folder of its checkpoints'
    writer.
    """
    folder = RunFolder(path)
    if not folder.config_file.is_file() or not _run_name(_read(folder.config_file)):
        return False
    return folder.had_launcher or CheckpointStore(path / "checkpoints", keep=1).had_writer


def read_folder(path: Path) -> FolderOfRun:
    """Return the run folder at `path`, which holds a config.toml.

    Raises:
        ConfigError: the recipe does not say where its NATS is, or its weight files are.
    """
    folder = RunFolder(path)
    recipe = _read(folder.config_file)
    files_dir = _section(_section(recipe, "trainer"), "weight_sync").get("files_dir")
    known = {name: value for name, value in _section(recipe, "bus").items() if name in BusConfig.model_fields}
    tls = {name: value for name, value in _section(recipe, "security").items() if name in SecurityConfig.model_fields}
    try:
        bus, security = BusConfig.model_validate(known), SecurityConfig.model_validate(tls)
        weight_files = WeightSyncConfig.model_validate({"files_dir": files_dir}).own_files_dir(path)
    except pydantic.ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ConfigError(
            f"{folder.config_file}: [bus], [security] or trainer.weight_sync.files_dir cannot be read: {reason}; "
            "correct it"
        ) from None
    if weight_files is not None and not belongs_to(weight_files, Path(os.path.abspath(path))):
        weight_files = None
    return FolderOfRun(folder=folder, run=_run_name(recipe), bus=bus, security=security, weight_files=weight_files)


def without_bus(path: Path) -> FolderOfRun:
    """Return the run folder at `path`, whose recipe does not say where its NATS is, as one without a NATS."""
    folder = RunFolder(path)
    run = _run_name(_read(folder.config_file))
    return FolderOfRun(folder=folder, run=run, bus=BusConfig(), security=SecurityConfig())


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _run_name(recipe: dict[str, Any]) -> str:
    return str(_section(recipe, "run").get("name", ""))


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    section = recipe.get(name, {})
    return section if isinstance(section, dict) else {}
