"""The base class of all settings, and how sections nest in it."""

import types
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from penstock.documented import Documented


class Config(Documented):
    """Base of all configuration: immutable, no unknown keys, only finite numbers; field docstrings are the help."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def leaves(prefix: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dumped section by dotted name."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(f"{prefix}.{name}", value) if isinstance(value, Mapping) else {f"{prefix}.{name}": value}
    return found


def section_of(annotation: Any) -> type[Config] | None:
    """Return the section that a field of this type holds: `C` for `C` and `C | None`; None for a plain value."""
    for candidate in (annotation, *_members(annotation, typing.Union, types.UnionType)):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


def table_of(annotation: Any) -> type[Config] | None:
    """Return the section that a field of this type holds under each name: `C` for `dict[str, C]`, else None."""
    values = _members(annotation, dict)
    return section_of(values[1]) if values else None


def _members(annotation: Any, *origins: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) in origins else ()
