"""Which builds of one version of a package hosts may have. Pure."""

from typing import Final

BUILD_REMEDY: Final = "install the same builds on all hosts with GPUs, or weights may not be pushed between them"
"""Says what to do about builds that may not go together."""


def without_build(version: str) -> str:
    """Return a version without its local label: `2.9.1` of `2.9.1+cpu`."""
    return version.partition("+")[0]


def go_together(one: str, other: str) -> bool:
    """Return whether processes with these builds of one version can work together.

    They are the same, or one is for CPUs: it takes no part in what GPUs do together. Builds for other versions of CUDA
    may bring other versions of NCCL, which refuse each other when they connect.
    """
    return one == other or any(version.endswith("+cpu") for version in (one, other))
