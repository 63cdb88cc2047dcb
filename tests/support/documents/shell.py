"""Names what is wrong with shell commands: what Penstock, make, Python and pip would not know or take."""

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException

from penstock import config, shipped
from penstock.errors import ConfigError
from services.cli.app import app
from services.cli.arguments import RecipeCommand
from services.recipe import Recipe
from tests.conftest import ROOT

_PLACEHOLDER = re.compile(r"<[a-z][a-z-]*>")
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
_ROOMS = ("recipes/", "examples/", "bench/", "tools/", "tests/")
"""Folders in which users make nothing: what a command names there exists."""
_REFERENCE = re.compile(r"--[\w.]+\.(?:function|class)=([\w.]+):(\w+)")
_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def shell_problems(text: str) -> list[str]:
    """What is wrong with the commands of a text; lines that are no commands of ours are left alone."""
    return [problem for words in _commands(text) for problem in _command_problems(words)]


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command, behind `&&`, `|` and `;` too, without comments and redirections."""
    text = _PLACEHOLDER.sub("PLACEHOLDER", text).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            words = list(lexer)
        except ValueError:  # a quotation that goes on in the next line: none of the commands that are checked
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word and set(word) <= set("();<>|&"):
                yield command
                command = []
            else:
                command.append(word)


def _command_problems(words: list[str]) -> Iterator[str]:
    variables = dict[str, str]()
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    words = [word for word in words if word != "..."]
    if not words:
        return
    name = words[0].rpartition("/")[2]
    if (check := _CHECKS.get(name)) is None:
        return
    yield from (f"there is no {word}" for word in words if word.startswith(_ROOMS) and not _exists(word))
    yield from check(words[1:])
    for module, attribute in _REFERENCE.findall(" ".join(words)) if "PYTHONPATH" in variables else ():
        file = ROOT / variables["PYTHONPATH"] / f"{module.replace('.', '/')}.py"
        if not file.exists() or attribute not in _defined(file):
            yield f"there is no {module}:{attribute} in {variables['PYTHONPATH']}"


def _exists(word: str) -> bool:
    path = word.partition("::")[0]
    return "PLACEHOLDER" in path or (ROOT / path).exists()


def _defined(file: Path) -> set[str]:
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def _penstock_problems(words: list[str]) -> Iterator[str]:
    command: Any = typer.main.get_command(app)
    shown = "penstock"
    while hasattr(command, "commands") and words:
        name, *words = words
        if name.startswith("-"):
            return
        shown += f" {name}"
        if name not in command.commands:
            yield f"there is no command `{shown}`"
            return
        command = command.commands[name]
    try:
        context = command.make_context(shown, list(words))
    except TyperException as error:
        yield f"`{shown}`: {error.format_message()}"
        return
    except typer.Exit:  # --help
        return
    if isinstance(command, RecipeCommand):
        yield from _override_problems(shown, words, context.args)


def _override_problems(shown: str, words: list[str], rest: list[str]) -> Iterator[str]:
    """The settings that a command line gives, laid over the recipes that it names, as far as those exist."""
    overrides = [word for word in rest if word.startswith("--")]
    if shown == "penstock replay":  # they are laid over those of a recorded step
        overrides.append("--demonstrations.path=rows.jsonl")
    known = shipped.recipes()
    recipes = [known[word] if word in known else ROOT / word for word in words if word in known or _is_recipe(word)]
    if shown != "penstock serve" and not recipes:
        recipes = [known["tiny-cpu"]]
    try:
        config.load(Recipe, recipes, overrides)
    except ConfigError as error:
        yield f"`{shown}`: {error}"


def _is_recipe(word: str) -> bool:
    return word.endswith(".toml") and (ROOT / word).is_file()


def _make_problems(words: list[str]) -> Iterator[str]:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))
    asked = [word for word in words if not word.startswith("-") and "=" not in word]
    yield from (f"there is no target {word}" for word in asked if word not in targets)


def _python_problems(words: list[str]) -> Iterator[str]:
    if words[:2] == ["-m", "services.cli"]:
        yield from _penstock_problems(words[2:])
        return
    if words[:1] == ["-m"] and words[1].partition(".")[0] in ("bench", "tools"):
        script = f"{words[1].replace('.', '/')}.py"
    elif words and words[0].startswith(_ROOMS):
        script = words[0]
    else:
        return
    if not (ROOT / script).exists():
        yield f"there is no {script}"
        return
    source = (ROOT / script).read_text()
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    yield from (f"{script} has no option {each}" for each in sorted(options) if f'"{each}"' not in source)


def _torchrun_problems(words: list[str]) -> Iterator[str]:
    for marker in (["-m", "services.cli"], ["--no-python", "penstock"]):
        for start in range(len(words) - 1):
            if words[start : start + 2] == marker:
                yield from _penstock_problems(words[start + 2 :])
                return
    yield "torchrun starts neither `-m services.cli` nor `--no-python penstock`"


def _pip_problems(words: list[str]) -> Iterator[str]:
    if any(word.partition("[")[0] == "penstock" for word in words):
        yield "penstock on PyPI is another project: install a checkout ('.[reward]') or a wheel"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for asked in re.findall(r"(?:\.|\.whl)\[([\w,-]+)\]", " ".join(words)):
        yield from (f"there is no extra {extra}" for extra in asked.split(",") if extra not in known)


def _pytest_problems(words: list[str]) -> Iterator[str]:
    yield from ()  # that the files exist is checked for every command


_CHECKS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "penstock": _penstock_problems,
    "make": _make_problems,
    "python": _python_problems,
    "torchrun": _torchrun_problems,
    "pip": _pip_problems,
    "pytest": _pytest_problems,
}
