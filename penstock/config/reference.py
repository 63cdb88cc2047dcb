"""Describes each setting: its type, range, default and help text, read from the models themselves."""

import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import annotated_types
import pydantic
import tomli_w
from pydantic.fields import FieldInfo

from penstock.config.base import Config, section_of, table_of
from penstock.documented import field_docstrings

_NAMES = {bool: "true or false", int: "integer", float: "number", Decimal: "number", str: "text", Path: "path"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    """The key within its section."""
    kind: str
    """The type and range, as text for people."""
    default: str
    """The default as TOML; "required" or "unset" if there is none."""
    help: str
    """The field's docstring, on one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of a recipe."""

    key: str
    """The dotted key that stands in brackets in TOML."""
    help: str
    """The model's docstring."""
    settings: Sequence[Setting]


def sections(model: type[Config], key: str = "") -> Iterator[Section]:
    """Yield the sections of `model`, each before those inside it."""
    plain, nested = [], []
    for name, field in model.model_fields.items():
        inner = f"{key}.{name}" if key else name
        if (section := section_of(field.annotation)) is not None:
            nested.append((section, inner))
        elif (table := table_of(field.annotation)) is not None:
            nested.append((table, f"{inner}.<name>"))
        else:
            help_text = field.description or field_docstrings(model).get(name, "")
            plain.append(_describe(field.alias or name, field, help_text))
    if plain:
        yield Section(key=key, help=inspect.cleandoc(model.__doc__ or ""), settings=plain)
    for section, inner in nested:
        yield from sections(section, inner)


def as_text(described: Sequence[Section]) -> str:
    """Format the sections for a terminal."""
    lines = []
    for section in described:
        lines += [f"[{section.key}]", *(f"  {line}" for line in section.help.splitlines()), ""]
        for setting in section.settings:
            lines += [f"  {setting.name} = {setting.default}", f"      {setting.kind}", f"      {setting.help}", ""]
    return "\n".join(lines)


def as_markdown(described: Sequence[Section]) -> str:
    """Format the sections for a documentation page: a table for each."""
    lines = []
    for section in described:
        lines += [f"## [{_escaped(section.key)}]", "", " ".join(section.help.split()), ""]
        lines += ["| setting | takes | default | meaning |", "|---|---|---|---|"]
        for setting in section.settings:
            cells = (f"`{setting.name}`", setting.kind, f"`{setting.default}`", setting.help)
            lines.append(f"| {' | '.join(map(_escaped, cells))} |")
        lines.append("")
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    """Return a table cell escaped so that it displays verbatim; in code spans `<` needs no escape."""
    text = cell.replace("|", "\\|")
    return text if text.startswith("`") else text.replace("<", "\\<")


def _describe(name: str, field: FieldInfo, help_text: str) -> Setting:
    return Setting(
        name=name,
        kind=_kind(field.annotation, field.metadata),
        default=_default(field),
        help=" ".join(help_text.split()),
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, Decimal):
        return str(value)
    return _as_toml(pydantic.TypeAdapter(Any).dump_python(value, mode="json"))


def _as_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    return "{}" if value == {} else tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def _kind(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin is typing.Annotated:
        return _kind(arguments[0], [*metadata, *arguments[1:]])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(kind, metadata) for kind in arguments if kind is not type(None))
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"list of {count}{_kind(arguments[0], ())}"
    if origin is dict:
        return f"table of {_kind(arguments[1], ())}"
    if annotation is pydantic.JsonValue:
        return "any value"
    if issubclass(annotation, enum.Enum):
        return " or ".join(f'"{member.value}"' for member in annotation)
    return f"{_NAMES[annotation]}{_range(metadata)}"


def _range(metadata: Sequence[Any]) -> str:
    bounds = []
    for mark in metadata:
        for kind, sign in (
            (annotated_types.Ge, ">="),
            (annotated_types.Gt, ">"),
            (annotated_types.Le, "<="),
            (annotated_types.Lt, "<"),
        ):
            if isinstance(mark, kind):
                bound = getattr(mark, kind.__name__.lower())
                bounds.append(f"{sign} {bound}" if isinstance(bound, int) else f"{sign} {bound:g}")
    return f", {', '.join(bounds)}" if bounds else ""
