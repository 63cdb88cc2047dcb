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
"""Packages that must have the same version where both hosts have them; builds may differ."""

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


def difference(found: Facts, own: Facts) -> str:
    """Return in what a host differs from the launcher's so that it cannot be part of the run; empty if in nothing."""
    python = f"Python {found['python']} is there, {own['python']} here"
    if found["python"] != own["python"]:
        return f"{python}; install the same one"
    if not found["penstock"]:
        return f"penstock is not installed there; install penstock {own['penstock']} as here"
    if found["penstock"] != own["penstock"]:
        return f"penstock {found['penstock']} is there, {own['penstock']} here; install the same version"
    if found["code"] != own["code"]:
        return (
            f"its penstock {found['penstock']} has other code ({found['code'] or 'none'}) than the one here "
            f"({own['code']}); install the same wheel, or the same checkout"
        )
    for name, version in own["versions"].items():
        there = found["versions"].get(name, version)
        if without_build(there) != without_build(version):
            return f"{name} {there} is there, {version} here; install the same version"
    return ""


def without_build(version: str) -> str:
    """Return a version without its local label: `2.9.1+cpu`, on a host without a GPU, goes with `2.9.1`."""
    return version.partition("+")[0]


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
