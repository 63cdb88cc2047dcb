"""The recipes and the models that come with Penstock, by name.

A wheel holds them beside this file; in a checkout of the repository they are in the folders `recipes` and `models`. A
recipe names such a model `builtin:NAME`, which means the same wherever the recipe is copied.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.errors import ConfigError

MODEL_PREFIX = "builtin:"

_MODELS = ("tiny-qwen3-vl", "tiny-qwen3-vl-zoom")
"""The models that come with Penstock; a checkout may hold other, downloaded ones beside them."""

_HERE = Path(__file__).parent
_ROOT = _HERE if (_HERE / "recipes").is_dir() else _HERE.parents[1]


def recipes() -> Mapping[str, Path]:
    """Return the files of the recipes by name, sorted."""
    return {file.stem: file for file in sorted((_ROOT / "recipes").glob("*.toml"))}


def models() -> Mapping[str, Path]:
    """Return the model folders by name."""
    return {name: _ROOT / "models" / name for name in _MODELS}


def schema_file() -> Path:
    """Return the JSON schema that recipes name in their first line, for editors."""
    return _ROOT / "recipes" / "recipe.schema.json"


def find_recipe(given: Path) -> Path:
    """Return `given` if it is a file, else the file of the recipe that it names.

    Raises:
        ConfigError: it is neither.
    """
    if given.is_file():
        return given
    known = recipes()
    if str(given) in known:
        return known[str(given)]
    if given.stem in known:
        raise ConfigError(
            f"recipe {given} cannot be read: there is no such file; `{given.stem}` alone names the recipe that comes "
            f"with Penstock, and `penstock init {given.stem}` copies it"
        )
    if given.suffix or given.parent != Path():
        return given  # its reader reports what is wrong
    raise ConfigError(
        f"recipe {given}: there is no such file, and no such recipe comes with Penstock; {_hint(given.name, known)}"
    )


def named_recipe(name: str) -> Path:
    """Return the file of the named recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    known = recipes()
    if name not in known:
        raise ConfigError(f"no recipe {name!r} comes with Penstock; {_hint(name, known)}")
    return known[name]


def find_model(given: str) -> Path:
    """Return the folder that `given` names: `builtin:NAME`, or a path.

    Raises:
        ValueError: no model of that name comes with Penstock.
    """
    if not given.startswith(MODEL_PREFIX):
        return Path(given)
    known, name = models(), given.removeprefix(MODEL_PREFIX)
    if name not in known:
        raise ValueError(f"no model of this name comes with Penstock; {_hint(name, known)}")
    return known[name]


def name_model(folder: Path) -> str:
    """Return a name that `find_model` accepts: `builtin:NAME` for a model that comes with Penstock, else the path."""
    for name, shipped in models().items():
        if folder == shipped:
            return f"{MODEL_PREFIX}{name}"
    return str(folder)


def _hint(name: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {similar[0]}?" if similar else f"there are {', '.join(known)}"
