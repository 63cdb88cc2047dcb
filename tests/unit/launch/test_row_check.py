"""Rows are read before a run starts: once, within a bound, and without what counts tokens."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError
from services.launch.checks import row_progress
from services.launch.checks.row_check import check_rows
from services.recipe import Recipe
from services.trainer.data.lengths import MIN_KEPT_ROWS
from services.trainer.data.sources.source import Source

NUM_ROWS = MIN_KEPT_ROWS + 100


def written(file: Path, num_rows: int = NUM_ROWS, *, wrong: Sequence[int] = ()) -> str:
    """A file of rows, of which some have an empty answer."""
    rows = [{"problem": f"{row} + 1?", "answer": "" if row in wrong else str(row + 1)} for row in range(num_rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run_of(tmp_path: Path, path: str, **data: Any) -> Recipe:
    """A run with one file of prompts, and a cache of its own."""
    return Recipe.model_validate({"data": {"path": path, "cache_dir": tmp_path / "cache", **data}})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that are read."""
    numbers: list[int] = []
    read_row = Source.__getitem__

    def noted(self: Source, number: int, /) -> Any:
        numbers.append(number)
        return read_row(self, number)

    monkeypatch.setattr(Source, "__getitem__", noted)
    return numbers


def test_rows_are_read_once_for_the_same_data(tmp_path: Path, read: list[int]) -> None:
    """The next start reads none of them; one with other settings, or of another file, reads all again."""
    recipe, said = run_of(tmp_path, written(tmp_path / "rows.jsonl")), list[str]()
    check_rows(recipe, with_sets=False, say=said.append)
    assert read == list(range(NUM_ROWS))
    check_rows(recipe, with_sets=False, say=said.append)
    assert len(read) == NUM_ROWS
    check_rows(run_of(tmp_path, recipe.data.paths[0], prompt_suffix="!"), with_sets=False, say=said.append)
    assert len(read) == 2 * NUM_ROWS
    written(tmp_path / "rows.jsonl", NUM_ROWS + 1)
    check_rows(recipe, with_sets=False, say=said.append)
    assert len(read) == 3 * NUM_ROWS + 1
    assert said == []


def test_a_row_of_its_own_sampling_is_read_each_time(tmp_path: Path, read: list[int]) -> None:
    """Whether it is right depends on sampling.max_new_tokens."""
    file = tmp_path / "rows.jsonl"
    rows = [{"problem": "?", "answer": "2", "own": {"max_new_tokens": 600}}] * NUM_ROWS
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {"data": {"path": str(file), "sampling_column": "own", "cache_dir": tmp_path}}
    check_rows(Recipe.model_validate({**values, "sampling": {"max_new_tokens": 600}}), with_sets=False, say=print)
    with pytest.raises(DataError, match=r"row 0: its max_new_tokens = 600 is above sampling\.max_new_tokens = 512"):
        check_rows(Recipe.model_validate(values), with_sets=False, say=print)


def test_a_row_that_wants_too_many_tokens_is_dropped(tmp_path: Path) -> None:
    """As the trainer does when it comes to such a row later."""
    file = tmp_path / "rows.jsonl"
    wanted = [100, 600, 100]
    rows = [{"problem": "?", "answer": "2", "own": {"max_new_tokens": most}} for most in wanted]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(file), "sampling_column": "own", "cache_dir": tmp_path, "wrong_rows": "drop"}
    check_rows(Recipe.model_validate({"data": data}), with_sets=False, say=print)


def test_what_is_left_unread_is_said(tmp_path: Path, read: list[int]) -> None:
    """Because there are too many rows, or because the time is over; the next start goes on from there."""
    recipe, said = run_of(tmp_path, written(tmp_path / "rows.jsonl", wrong=[NUM_ROWS - 1])), list[str]()
    check_rows(recipe, with_sets=False, say=said.append, max_s=-1)
    assert read == []
    assert f"{NUM_ROWS} of {NUM_ROWS} rows are not read before the start" in said[-1]
    check_rows(recipe, with_sets=False, say=said.append, max_rows=10)
    assert read == list(range(10))
    assert f"{NUM_ROWS - 10} of {NUM_ROWS} rows are not read before the start" in said[-1]
    assert said[-1].startswith("data.path '")
    assert said[-1].endswith("`penstock data` reads all")
    with pytest.raises(DataError, match=rf"rows\.jsonl', row {NUM_ROWS - 1}: column 'answer' holds .*repair the row"):
        check_rows(recipe, with_sets=False, say=said.append)
    assert read[10:] == list(range(10, NUM_ROWS))


def test_wrong_rows_that_are_dropped_do_not_end_the_start(tmp_path: Path) -> None:
    """Unless there is no other."""
    check_rows(
        run_of(tmp_path, written(tmp_path / "a.jsonl", 4, wrong=[1]), wrong_rows="drop"), with_sets=False, say=print
    )
    recipe = run_of(tmp_path, written(tmp_path / "b.jsonl", 2, wrong=[0, 1]), wrong_rows="drop")
    with pytest.raises(DataError, match="column 'answer' holds"):
        check_rows(recipe, with_sets=False, say=print)


def test_only_the_rows_that_a_set_plays_are_read(tmp_path: Path) -> None:
    """A wrong row behind `num_prompts` is nobody's fault."""
    sets = {"s": {"path": written(tmp_path / "rows.jsonl", 4, wrong=[2]), "num_prompts": 2}}
    values: dict[str, Any] = {"evaluation": {"at_end": True, "sets": sets}}
    check_rows(Recipe.model_validate(values), with_sets=True, say=print)
    sets["s"]["num_prompts"] = 3
    with pytest.raises(DataError, match=r"^evaluation\.sets\.s: data\.path '.*rows\.jsonl', row 2: column 'answer'"):
        check_rows(Recipe.model_validate(values), with_sets=True, say=print)


def test_the_built_in_problems_are_not_read(read: list[int]) -> None:
    """But the first of each set, for the columns that its results are broken down by."""
    sets = {"a": {"num_prompts": 200}, "b": {"pictures": "held_out"}}
    values = {"evaluation": {"at_end": True, "sets": sets}}
    check_rows(Recipe.model_validate(values), with_sets=True, say=print)
    assert read == [0, 0]


def test_rows_that_name_a_profile_are_read_each_time(tmp_path: Path) -> None:
    """Whether they are right depends on the verifiers."""
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps({"problem": "?", "answer": "2", "own": "mine"}) + "\n") * NUM_ROWS)
    values: dict[str, Any] = {"data": {"path": str(file), "profile_column": "own", "cache_dir": tmp_path}}
    known = {"reward": {"verifiers": {"mine": "mine.py:verify"}}}
    check_rows(Recipe.model_validate({**values, **known}), with_sets=False, say=print)
    with pytest.raises(DataError, match=r"row 0: its profile = 'mine' is unknown; known: dapo, .*; repair the row or"):
        check_rows(Recipe.model_validate(values), with_sets=False, say=print)


def test_reading_shows_its_progress_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard output is no terminal."""
    monkeypatch.setattr(row_progress, "SAY_EVERY_S", -1.0)
    said = list[str]()
    check_rows(run_of(tmp_path, written(tmp_path / "rows.jsonl", 2)), with_sets=False, say=said.append)
    assert [line.rpartition(": ")[2] for line in said] == ["1 of 2 rows read", "2 of 2 rows read"]


def test_reading_shows_a_bar_on_a_terminal(tmp_path: Path, tiny_model_path: Path) -> None:
    """Of `penstock train`: rows read, of all, up to the wrong one."""
    path = written(tmp_path / "rows.jsonl", 3, wrong=[2])
    (tmp_path / "r.toml").write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[model]\npath = "{tiny_model_path}"\n[data]\npath = "{path}"\n'
    )
    command = [sys.executable, "-m", "services.cli", "train", str(tmp_path / "r.toml")]
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=end, stderr=subprocess.PIPE, env=environment) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as opened:  # EIO ends a terminal
            while piece := opened.read(65536):
                shown += piece
        _, error = process.communicate(timeout=200)
    assert process.returncode == 2
    assert re.search(r"rows\.jsonl' .* 2/3", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    assert b"rows.jsonl', row 2: column 'answer' holds empty text" in error


def test_no_tokenizer_is_loaded(tmp_path: Path) -> None:
    """The process that starts the others stays small."""
    recipe = run_of(tmp_path, written(tmp_path / "rows.jsonl", 3))
    program = (
        "import sys; from services.launch.checks.row_check import check_rows; from services.recipe import Recipe\n"
        f"check_rows(Recipe.model_validate_json({recipe.model_dump_json()!r}), with_sets=True, say=print)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
