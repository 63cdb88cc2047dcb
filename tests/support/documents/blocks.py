"""Finds the code blocks of a document, and names what is wrong with each, by its language.

A block that cannot be checked is preceded by a comment that says why: `<!-- unchecked: the reason -->`.
"""

import ast
import importlib
import importlib.util
import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

from penstock import config, shipped
from penstock.errors import ConfigError
from services.recipe import Recipe
from tests.support.documents.shell import shell_problems

_UNCHECKED = "<!-- unchecked:"
_DIAGRAMS = ("flowchart", "sequenceDiagram", "stateDiagram-v2")
_RESERVED = re.compile(r"(?:^[ ]*|-->[ ]*)(call|click|end|graph|style)[ ]*-->", re.MULTILINE)
"""A word of Mermaid's in the place of a node's name, with which a flowchart is not drawn."""
_NOT_INSTALLED = {"reasoning_gym", "skyrl_gym"}
"""Packages that blocks import and that only `make test-adapters` installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block."""

    line: int
    """Of the document, from 1."""
    language: str
    """Empty for an indented block."""
    text: str
    is_fenced: bool
    reason: str
    """Why it is not checked; empty if it is."""


def blocks_of(text: str) -> Iterator[Block]:
    """The code blocks of a Markdown text, those in lists included."""
    comment = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            reason = comment.removeprefix(_UNCHECKED).removesuffix("-->").strip() if comment else ""
            yield Block(
                line=token.map[0] + 1,
                language=token.info.strip(),
                text=token.content,
                is_fenced=token.type == "fence",
                reason=reason,
            )
        comment = token.content.strip() if token.type == "html_block" and _UNCHECKED in token.content else ""


def is_loaded(block: Block) -> bool:
    """Whether `problems_of` reads the whole block, and not only the commands in it."""
    return _is_recipe(block) or (block.is_fenced and block.language in ("toml", "json", "yaml", "mermaid"))


def _is_recipe(block: Block) -> bool:
    """Whether an indented block is a part of a recipe."""
    first = block.text.partition("\n")[0]
    return not block.is_fenced and first.startswith("[") and first.endswith("]") and '"' not in first


def problems_of(block: Block) -> list[str]:
    """What is wrong with it; of an indented block, with the commands and the settings that it shows."""
    if block.reason:
        return []
    if not block.is_fenced:
        return _recipe_problems(block.text) if _is_recipe(block) else shell_problems(block.text)
    if (check := _CHECKS.get(block.language)) is None:
        return [f"language {block.language!r}: write one of {', '.join(_CHECKS)}"]
    return check(block.text)


def _python_problems(text: str) -> list[str]:
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        return [f"no Python: {error}"]
    return [problem for node in ast.walk(tree) for problem in _import_problems(node)]


def _import_problems(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            modules = [(each.name, None) for each in names]
        case ast.ImportFrom(module=str(module), names=names):
            modules = [(module, each.name) for each in names]
        case _:
            return
    for module, name in modules:
        top = module.partition(".")[0]
        if top in _NOT_INSTALLED:
            continue
        if importlib.util.find_spec(top) is None:
            yield f"there is no package {top}"
        elif top in ("penstock", "services") and not _has(module, name):
            yield f"there is no {module}{f'.{name}' if name else ''}"


def _has(module: str, name: str | None) -> bool:
    try:
        return name is None or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def _recipe_problems(text: str) -> list[str]:
    """It is laid over the tiny recipe, or, where the two contradict each other, over the defaults."""
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "block.toml"
        overlay.write_text(text)
        for below in ([shipped.recipes()["tiny-cpu"]], []):
            try:
                config.load(Recipe, [*below, overlay], [])
            except ConfigError as error:
                problem = f"no recipe: {error}"
            else:
                return []
    return [problem]


def _json_problems(text: str) -> list[str]:
    try:
        json.loads(text)
    except ValueError as error:
        return [f"no JSON: {error}"]
    return []


def _yaml_problems(text: str) -> list[str]:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    return []


def _mermaid_problems(text: str) -> list[str]:
    kind = text.split(maxsplit=1)[0]
    if kind not in _DIAGRAMS:
        return [f"no diagram of a known kind: {kind}"]
    return [f"{name} is a word of Mermaid's, and no node" for name in _RESERVED.findall(text)]


def _nothing(_text: str) -> list[str]:
    return []


_CHECKS: dict[str, Callable[[str], list[str]]] = {
    "python": _python_problems,
    "toml": _recipe_problems,
    "json": _json_problems,
    "yaml": _yaml_problems,
    "sh": shell_problems,
    "mermaid": _mermaid_problems,
    "text": _nothing,
}
