"""What a host says of itself before anything of a run starts there.

This module travels to hosts by value, so that one without Penstock, or with another version of it, can answer: it
imports the standard library only.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import time
from pathlib import Path
from typing import Any, TypeAlias

_PACKAGES = ("penstock", "services")
_COMPARED = ("torch", "sglang", "transformers")
"""Packages that are compared where both hosts have them."""

Facts: TypeAlias = dict[str, Any]
"""The answer of a host: its `python`; the version of its `penstock`, empty if it is not installed; a digest of its
`code`; the `versions` of compared packages that are installed, by name; and whether it `sees_run_folder`, by the file
that the launcher wrote there. A plain dict, to travel by value.
"""


def look(mark: str) -> Facts:
    """Return the facts of this host; `mark` is a file that the launcher wrote, empty if it wrote none."""
    return {
        "python": platform.python_version(),
        "penstock": _version("penstock"),
        "code": code_digest(),
        "versions": {name: version for name in _COMPARED if (version := _version(name))},
        "sees_run_folder": bool(mark) and Path(mark).is_file(),
    }


def clock() -> float:
    """Return this host's clock, in seconds since 1970.

    It is no part of `look`: Python may take seconds to start before that, which would hide that the clock is behind.
    """
    return time.time()


def _version(name: str) -> str:
    """Return the version of an installed package, without importing it; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_digest() -> str:
    """Return a digest of the modules of Penstock, which a checkout can change without changing the version."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return ""
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{name}/{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
