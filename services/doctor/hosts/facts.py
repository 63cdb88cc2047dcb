"""What hosts tell each other, and how each finds out its own part."""

import hashlib
import importlib.metadata
import platform
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic

import penstock
import services
from penstock.config import RunConfig
from services.doctor.hosts.ports import MARKER, MAX_PORTS, OpenPort, reach_all
from services.recipe import Recipe

PACKAGES = ("penstock", "torch", "sglang", "transformers")
"""Packages that are compared where both hosts have them."""


class Question(pydantic.BaseModel):
    """What a host asks another."""

    marker: str = pydantic.Field(pattern=MARKER)
    """Random name of the file that the asker has written into the run folder."""
    advertised: str = pydantic.Field(max_length=255)
    """Name or address under which the asker has itself reached."""
    ports: dict[str, OpenPort] = pydantic.Field(max_length=MAX_PORTS)
    """Ports of the asker that others must reach, by setting."""


class HostFacts(pydantic.BaseModel):
    """What a host answers."""

    host: str
    """Its own name."""
    advertised: str
    """Name or address under which it has itself reached."""
    python: str
    """Version of Python."""
    versions: dict[str, str]
    """Versions of packages that are installed, by name."""
    code: str
    """Digest of Penstock's source files."""
    model: str
    """Digest of the model folder's file names, sizes and JSON files; empty if the folder is not there."""
    sees_marker: bool
    """Whether the asker's file is in the run folder."""
    reach_errors: dict[str, str]
    """Why each of the asker's ports was not reached under its name, by setting; an empty text if it was."""
    ports: dict[str, OpenPort] = pydantic.Field(max_length=MAX_PORTS)
    """Its own ports that others must reach, by setting."""
    heard_at: float
    """The wall clock when the question had come, in seconds since 1970."""
    said_at: float
    """The wall clock before the answer left."""


def shared_folder(run: RunConfig) -> Path:
    """Return the folder that hosts share: the run's own, or the parent of runs."""
    return (run.folder or run.dir).absolute()


def marker_file(run: RunConfig, marker: str) -> Path:
    """Return the file by which a host recognises a shared folder."""
    return shared_folder(run) / f".doctor-{marker}"


def look(recipe: Recipe, question: Question, ports: Mapping[str, OpenPort]) -> HostFacts:
    """Return this host's answer, with its own `ports`. Blocking: it reads files, and connects to the asker."""
    heard_at = time.time()
    facts = own_facts(recipe)
    return facts.model_copy(
        update={
            "sees_marker": marker_file(recipe.run, question.marker).is_file(),
            "reach_errors": reach_all(question.advertised, question.ports),
            "ports": dict(ports),
            "heard_at": heard_at,
            "said_at": time.time(),
        }
    )


def own_facts(recipe: Recipe) -> HostFacts:
    """Return what this host knows of itself."""
    now = time.time()
    return HostFacts(
        host=socket.gethostname(),
        advertised=recipe.network.advertised,
        python=platform.python_version(),
        versions=installed_versions(),
        code=code_digest(),
        model="" if recipe.model is None else model_digest(recipe.model.path),
        sees_marker=True,
        reach_errors={},
        ports={},
        heard_at=now,
        said_at=now,
    )


def installed_versions(version: Callable[[str], str] = importlib.metadata.version) -> dict[str, str]:
    """Return the versions of those of PACKAGES that are installed; none is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code_digest() -> str:
    """Return a digest of Penstock's source files: checkouts of one version may differ."""
    digest = hashlib.sha256()
    for package in (penstock, services):
        for root in sorted(package.__path__):
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def model_digest(folder: Path) -> str:
    """Return a digest of a model folder without reading its weights; empty if the folder is not there."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        if file.suffix in (".json", ".jinja"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
