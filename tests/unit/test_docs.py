"""What the documents name exists: links, paths into the tree, and settings."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.reference import sections
from penstock.v1 import generate_pb2
from services.recipe import Recipe

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:penstock|services|proto|tests|bench|recipes|deploy|docs|models|tools|examples)/[\w./{}-]*)`")
_CODE = re.compile(r"`([^`]+)`")
_SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_<>]+)+)`")
_GIVEN = re.compile(r"--([a-z_]+\.[\w.]+)=")
_EVENT = re.compile(r"log\.\w+\(\s*'?\"([a-z_.]+)\"")
_DOCUMENTS = sorted(
    path.relative_to(_ROOT).as_posix()
    for path in (*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "examples").rglob("*.md"))
)

_NO_SETTINGS = {"data.lengths", "model.visual", "model.language_model", "sampling.constraint.json_schema"}
"""Modules of Python and of models, and a field of a request, whose names begin as sections do."""
_NOT_IN_THE_TREE = {"deploy/.env", "deploy/docker-compose.trackers.yml", "deploy/trackers.Dockerfile"}
"""Files that users write."""


def _named(document: Path) -> Iterator[tuple[str, Path]]:
    text = document.read_text()
    for target in _LINK.findall(text):
        if "://" not in target:
            yield target, document.parent / target
    for target in _PATH.findall(text):
        if "{" not in target and target not in _NOT_IN_THE_TREE:
            yield target, _ROOT / target


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    """A file that was moved or deleted is not left behind in a text."""
    assert [name for name, path in _named(_ROOT / document) if not path.exists()] == []


def test_a_trainer_that_is_replaced_has_ended() -> None:
    """Before an upgrade, or its lock fails the new one's Job, and before NATS goes, or it writes no checkpoint."""
    texts = [(_ROOT / document).read_text() for document in _DOCUMENTS]
    texts.append((_ROOT / "deploy/helm/templates/NOTES.txt").read_text())
    commands = [line for text in texts for line in re.findall(r"kubectl .*\bdelete job .*", text)]
    assert sum("uninstall" in line for line in commands) == 2
    assert [line for line in commands if "--cascade=foreground" not in line] == []


def test_settings_of_the_compose_stack_last() -> None:
    """Each in one line of deploy/.env: what stands before a single command, or in an earlier line, is lost."""
    text = (_ROOT / "docs/operation/deploy.md").read_text()
    assert re.findall(r"^    (?:PENSTOCK_\w+=.* make .*|echo \"COMPOSE_FILE=.*)$", text, re.MULTILINE) == []


def test_files_of_a_container_are_copied_after_its_end() -> None:
    """`docker compose ps -q` names only what still runs."""
    text = (_ROOT / "docs/operation/deploy.md").read_text()
    assert {*re.findall(r"docker cp \$\(.*?compose ps (\S+)", text)} == {"-aq"}


_TABLES = sorted((_ROOT / "docs" / "coming-from").glob("*.md"))
"""Tables of other frameworks' switches: the second column has settings of ours."""

_SCRIPT_VARIABLES = ("MODEL_NAME", "DATASET_NAME", "NUM_GPUS", "EXTERNAL_RAY", "TRAIN_BACKEND")


def _rows(document: Path) -> Iterator[list[str]]:
    """The cells of each row of its tables."""
    for line in document.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@functools.cache
def _settings() -> frozenset[str]:
    return frozenset(f"{section.key}.{setting.name}" for section in sections(Recipe) for setting in section.settings)


@functools.cache
def _sections() -> frozenset[str]:
    return frozenset(key for each in sections(Recipe) for key in (each.key, each.key.removesuffix(".<name>")))


def _is_known(name: str) -> bool:
    """Whether it is a section, a setting (with any name for a `<name>`), or an entry of a setting that is a table."""
    parts = name.split(".")
    generic = {".".join([*parts[:number], "<name>", *parts[number + 1 :]]) for number in range(1, len(parts))}
    names = {name, *generic}
    return not names.isdisjoint(_settings() | _sections()) or ".".join(parts[:-1]) in _settings()


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_the_settings_that_a_document_names_exist(document: str) -> None:
    """In its sentences and in the commands that it shows."""
    text = (_ROOT / document).read_text()
    if _ROOT / document in _TABLES:  # the first column has the switches of others
        text = "\n".join(["|".join(cells[1:]) for cells in _rows(_ROOT / document)])
    tops = {name.partition(".")[0] for name in _settings()}
    named = {name for name in _SETTING.findall(text) if name.partition(".")[0] in tops} | {*_GIVEN.findall(text)}
    named = {name for name in named if not name.endswith((".json", ".jsonl"))} - {"section.key", *_events()}
    assert sorted(name for name in named if not _is_known(name)) == []


@functools.cache
def _events() -> frozenset[str]:
    """The events that processes log, some of which begin as sections do."""
    files = (path for room in ("penstock", "services") for path in (_ROOT / room).rglob("*.py"))
    return frozenset(name for path in files for name in _EVENT.findall(path.read_text()))


def _unknown_settings(text: str) -> set[str]:
    """The dotted names in a text that begin as settings do, and are neither one nor an event or a file."""
    tops = "|".join({each.partition(".")[0] for each in _settings()})
    named = set(re.findall(rf"(?<![\w/.-])(?:{tops})(?:\.[a-z_0-9]+)+", text))
    fields = {f"sampling.{each.name}" for each in generate_pb2.SamplingParams.DESCRIPTOR.fields}
    suffixes = {".json", ".jsonl", ".msgpack", ".pt", ".safetensors"}
    return {
        each
        for each in named - _events() - _NO_SETTINGS - fields
        if not _is_known(each) and Path(each).suffix not in suffixes
    }


def test_the_settings_that_the_code_names_exist() -> None:
    """In errors, warnings and docstrings: a remedy that names a setting of yesterday helps nobody."""
    unknown = set()
    for path in (each for room in ("penstock", "services") for each in (_ROOT / room).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        unknown |= _unknown_settings("\n".join(texts))
    assert unknown == set()


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/dashboards/run.json"])
def test_the_settings_that_alerts_and_dashboards_name_exist(file: str) -> None:
    """Their remedies are read in the middle of the night."""
    assert _unknown_settings((_ROOT / "deploy" / file).read_text()) == set()


@pytest.mark.parametrize("document", _TABLES, ids=lambda path: path.name)
def test_the_settings_of_a_switch_exist(document: Path) -> None:
    """The second column of a table of switches has nothing but settings, in code."""
    rows = list(_rows(document))
    assert all(len(cells) == 3 for cells in rows), [cells for cells in rows if len(cells) != 3]
    named = {name for cells in rows for name in _CODE.findall(cells[1])}
    assert sorted(name for name in named if not _is_known(name)) == []
    assert len(named) > 30


@pytest.mark.parametrize("document", _TABLES, ids=lambda path: path.name)
def test_every_switch_has_an_answer(document: Path) -> None:
    """A setting, or why there is none."""
    assert [cells[0] for cells in _rows(document) if not any(cells[1:])] == []


def test_every_variable_of_slime_s_script_has_a_row() -> None:
    """Whoever started its example with one finds it by name."""
    firsts = " ".join(cells[0] for cells in _rows(_ROOT / "docs" / "coming-from" / "slime.md"))
    assert [name for name in _SCRIPT_VARIABLES if f"`SLIME_SCRIPT_{name}`" not in firsts] == []
