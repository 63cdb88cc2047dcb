"""Reads a recipe: merges TOML files, applies overrides, and validates with errors that people can act on.

pydantic-settings reads the same sources, but its command line answers mistakes with argparse's usage text. It does not
suggest fixes for mistyped keys or keep text settings as text. Only the merging is left to do here.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import tomli_w

from penstock.config.base import Config, section_of, table_of
from penstock.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Config)

_SELECTORS = ("preset", "kind")
"""Keys whose value decides the meaning of the other keys of their table."""
_CUTOFF_OF_OTHER_SECTIONS = 0.9
"""Least similarity, up to 1, of a suggestion from another section: one slip in a long name, none in a short one."""
_UNQUOTED_LIST = re.compile(r"""\[([^\[\]{}"']+)\]""")
"""A list of TOML without the quotes around its items."""


def load(model: type[ConfigT], recipes: Sequence[Path], overrides: Iterable[str] = ()) -> ConfigT:
    """Merge `recipes` from left to right, apply `overrides` in order, and validate.

    A table that names its `preset` replaces the earlier one instead of adding to it. One that names its `kind` drops
    the earlier one's plain values, because settings of one kind have no meaning, or another one, in a different kind.

    Args:
        model: The model of a whole recipe.
        recipes: TOML files. A table in a later one adds to the earlier; every other value replaces it.
            Without any, all settings have their defaults.
        overrides: `--a.b=c` each; c is read as a TOML value; if it is not one, as a list of texts if it looks like
            `[a, b]`, and else as text.

    Raises:
        ConfigError: names each wrong key, its value and what would be right.
    """
    tree: dict[str, Any] = {}
    for path in recipes:
        _lay_over(tree, _read(path))
    texts = dict(_apply_override(tree, override) for override in sorted(overrides, key=_precedence))
    try:
        try:
            return model.model_validate(tree)
        except pydantic.ValidationError as error:
            # Only the validation shows which values must be text: --run.name=2026 means "2026".
            _take_as_text(tree, texts, error)
            return model.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_explain(model, detail) for detail in error.errors())) from None


def dump(config: Config) -> str:
    """Return the whole of `config` as TOML, which `load` reads back unchanged; unset settings are omitted."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}; give the path of a .toml file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path} is not TOML: it is not UTF-8 text; give the path of a .toml file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not TOML: {error}") from None


def _lay_over(tree: dict[str, Any], upper: dict[str, Any]) -> None:
    for selector in _SELECTORS:
        if selector in upper:
            _forget(tree, selector)
    for key, value in upper.items():
        lower = tree.get(key)
        if isinstance(value, dict) and isinstance(lower, dict):
            _lay_over(lower, value)
        else:
            tree[key] = value


def _forget(tree: dict[str, Any], selector: str) -> None:
    """Drop the values of a table whose meaning another value of `selector` changes."""
    kept = {} if selector == "preset" else {key: value for key, value in tree.items() if isinstance(value, dict)}
    tree.clear()
    tree.update(kept)


def _precedence(override: str) -> int:
    """Order overrides: first those of a `preset`, then those of a `kind`, so that they do not drop the others."""
    leaf = _leaf(override.partition("=")[0])
    return _SELECTORS.index(leaf) if leaf in _SELECTORS else len(_SELECTORS)


def split_override(override: str) -> tuple[str, str]:
    """Return the dotted key and the text of `--a.b=c`.

    Raises:
        ConfigError: it is not of this form.
    """
    key, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or "." not in key or "" in key.split("."):
        raise ConfigError(f"argument {override!r} is not an override; write --section.key=value")
    if not equals:
        raise ConfigError(f"argument {override!r} has no value; write --section.key=value, with = and without a space")
    return key, text


def _apply_override(tree: dict[str, Any], override: str) -> tuple[tuple[str, ...], str]:
    """Put the override's value into `tree`; return its key's parts and its text."""
    key, text = split_override(override)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = _read_unquoted(text)
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"argument {override!r}: {section} is a value, not a section")
    if leaf in _SELECTORS:
        _forget(node, leaf)
    node[leaf] = value
    return (*sections, leaf), text


def _read_unquoted(text: str) -> str | list[str]:
    """Return the items of a list whose quotes the shell has removed, `[a, b]`; any other text as it is."""
    found = _UNQUOTED_LIST.fullmatch(text)
    items = [item.strip() for item in found[1].split(",")] if found else []
    return items if items and all(items) else text


def _take_as_text(tree: dict[str, Any], texts: dict[tuple[str, ...], str], error: pydantic.ValidationError) -> None:
    """Replace by their texts the overrides that were read as another type, and that the error says must be text."""
    for detail in error.errors():
        key = tuple(str(part) for part in detail["loc"])
        is_one_of_types = key not in texts and key[-1:] == ("str",)  # that the setting can have; a list is another
        if is_one_of_types:
            key = key[:-1]
        if detail["type"] in ("string_type", "path_type") and key in texts:
            *sections, leaf = key
            node = tree
            for section in sections:
                node = node[section]
            node[leaf] = _read_unquoted(texts[key]) if is_one_of_types else texts[key]


def _explain(model: type[Config], detail: Any) -> str:
    """Format one validation error as `section.key = value: what is wrong`; one about several sections has no key."""
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}; {_suggest(model, tuple(map(str, detail['loc'])))}"
    if detail["type"] == "missing":
        return f"key {location} is missing; add it to the recipe or give --{location}=..."
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "tuple_type":
        message = f"give a list in brackets, such as {_example_of_list(detail['input'])}"
    if isinstance(detail["input"], dict):
        return f"{location}: {message}" if location else message
    return f"{location} = {str(detail['input'])!r}: {message}"


def _example_of_list(given: Any) -> str:
    """Return a list in TOML: of the text that was given in its place, unless that already tries to be one."""
    is_item = isinstance(given, str) and not given.startswith("[")
    return f"[{json.dumps(given)}]" if is_item else '["a", "b"] or [0.9, 0.95]'


def _suggest(model: type[Config], location: tuple[str, ...]) -> str:
    """Suggest what an unknown key should be: a similar or longer key beside it, or the same or nearly so elsewhere."""
    *section, key = location
    known = sorted(field.alias or name for name, field in _section_at(model, section).model_fields.items())
    similar = difflib.get_close_matches(key, known, n=1) or [name for name in known if name.startswith(f"{key}_")]
    meant = [".".join((*section, name)) for name in similar] or [path for path in _keys(model) if _leaf(path) == key]
    if not meant:
        meant = [
            path
            for path in _keys(model)
            if difflib.get_close_matches(key, [_leaf(path)], cutoff=_CUTOFF_OF_OTHER_SECTIONS)
        ]
    if meant:
        return f"did you mean {' or '.join(meant[:3])}?"
    return f"known here: {', '.join(known)}"


def _section_at(model: type[Config], section: Sequence[str]) -> type[Config]:
    names = iter(section)
    for name in names:
        annotation = model.model_fields[name].annotation
        if (table := table_of(annotation)) is not None:
            next(names)  # the name that the user chose
        model = section_of(annotation) or table or model
    return model


def _keys(model: type[Config], prefix: str = "") -> list[str]:
    """Return the dotted keys of all settings."""
    keys = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        keys += [f"{prefix}{name}"] if section is None else _keys(section, f"{prefix}{name}.")
    return keys


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
