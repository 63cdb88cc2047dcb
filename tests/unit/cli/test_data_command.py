"""`penstock data`: what it prints, what it writes, and when it fails."""

import contextlib
import html.parser
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.model.chat.chat_template import Renderer
from penstock.telemetry import log
from services.cli import main
from tests.support.trainer.data.pictures import png

SOUND = {"images": [png(size=(64, 48))], "problem": "<image>Find <b>x</b> & y.", "answer": "5", "level": "<script>"}


@pytest.fixture(autouse=True)
def _log_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command configures the log of its process, which here is that of all tests."""
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)


def recipe(tmp_path: Path, rows: list[dict[str, Any]], *, more: str = "") -> str:
    """A recipe whose data are these rows."""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    text = f'[run]\nname = "try"\n[data]\npath = "{tmp_path}/a.parquet"\ncache_dir = "{tmp_path}/cache"\n{more}'
    (tmp_path / "r.toml").write_text(text)
    return str(tmp_path / "r.toml")


def test_a_report_of_sound_rows(tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns, images, lengths as the engine counts them, and what training passes over."""
    rows = [SOUND, {**SOUND, "images": [png(size=(128, 96))]}, {**SOUND, "problem": f"<image>{'long ' * 200}"}]
    more = f'[model]\npath = "{tiny_model_path}"\n[sampling]\nmax_new_tokens = 8\n[rollout]\ncontext_length = 500\n'
    assert main(["data", recipe(tmp_path, rows, more=more)]) == 0
    out = capsys.readouterr().out
    for line in (
        f"data.path '{tmp_path}/a.parquet'",
        "rows       3, in 1 file",
        "columns    text problem, answer answer, images images; extra level",
        "images     1 in 3 rows; 64 x 48 to 128 x 96 pixels, median 64 x 48",
        "profile    geo3k 3",
        "dropped    1 rows that are too long",
    ):
        assert line in out
    assert re.search(r"tokens     median \d+, 90% \d{3}, 99% \d{3}, longest \d{3}; at most 492", out)
    assert main(["data", str(tmp_path / "r.toml"), "--rows=1"]) == 0
    assert "rows       3, 1 of them read" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "r.toml"), "--filters.overlong_prompts=keep"]) == 0
    out = capsys.readouterr().out
    assert "dropped    0 rows that are too long" in out
    assert "kept       1 rows that are too long, played with the room that is left, if any" in out


def test_rows_without_marks_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How often images_first acted."""
    unmarked = {**SOUND, "problem": "Find x."}
    assert main(["data", recipe(tmp_path, [SOUND, unmarked, unmarked]), "--data.images_first=true"]) == 0
    assert "put before the text in 2 rows without <image>" in capsys.readouterr().out


def test_reading_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    """Rows read, of all, on standard error; the report is on standard output."""
    command = [sys.executable, "-m", "services.cli", "data", recipe(tmp_path, [SOUND] * 3)]
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=environment) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as opened:  # EIO ends a terminal
            while piece := opened.read(65536):
                shown += piece
        report, _ = process.communicate(timeout=200)
    assert process.returncode == 0, shown
    assert re.search(r"rows .* 3/3", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    assert b"rows       3, in 1 file" in report
    assert b"3/3" not in report


def test_wrong_rows_are_listed_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them at once, where training would stop at the first."""
    rows = [SOUND, {**SOUND, "answer": ""}, SOUND, {**SOUND, "images": [b"no picture"]}]
    assert main(["data", recipe(tmp_path, rows)]) == 1
    out = capsys.readouterr().out
    assert "wrong      2 rows, refused or dropped as data.wrong_rows says:" in out
    assert "a.parquet', row 1: column 'answer' holds empty text" in out
    assert "a.parquet', row 3: image 0 (10 bytes) cannot be decoded" in out
    assert main(["data", str(tmp_path / "r.toml"), "--data.wrong_rows=drop"]) == 0


def test_only_the_first_of_many_wrong_rows_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the report says so."""
    assert main(["data", recipe(tmp_path, [{**SOUND, "answer": ""}] * 9)]) == 1
    out = capsys.readouterr().out
    assert "wrong      9 rows, refused or dropped as data.wrong_rows says; the first 8 of 9:" in out
    assert out.count("column 'answer' holds empty text") == 8


def test_a_row_that_wants_more_tokens_than_the_run_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is wrong, as in training; a demonstration is not sampled."""
    rows = [{**SOUND, "own": {"max_new_tokens": number}} for number in (8, 600)]
    named = [recipe(tmp_path, rows), "--data.sampling_column=own"]
    assert main(["data", *named]) == 1
    out = capsys.readouterr().out
    assert "a.parquet', row 1: its max_new_tokens = 600 is above sampling.max_new_tokens = 512; raise the sett" in out
    assert main(["data", *named, "--data.wrong_rows=drop"]) == 0
    assert main(["data", *named, "--sampling.max_new_tokens=600"]) == 0
    assert main(["data", *named, "--sft"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollout.context_length=80"], r"all 2 prompts are longer than the 72 tokens .*; raise rollout\.context"),
        (["--data.limits.max_tokens=70"], r"all 2 prompts are longer than the 69 tokens .*; raise data\.limits\.max_"),
        (["--sft", "--sft.max_tokens=70"], r"all 2 conversations are longer than the 70 tokens .*; raise sft\.max_tok"),
        (
            ["--demonstrations.path=d.parquet", "--demonstrations.max_tokens=70"],
            r"all 2 conversations are longer than the 70 tokens .*; raise demonstrations\.max_tokens",
        ),
    ],
    ids=["context", "budget", "sft", "demonstrations"],
)
def test_rows_that_are_all_too_long_fail(
    tmp_path: Path,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """With training's reason and remedy."""
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": "x" * number, "answer": "5"} for number in (90, 95)]
    pq.write_table(pa.Table.from_pylist(rows), "d.parquet")
    more = f'[model]\npath = "{tiny_model_path}"\n[sampling]\nmax_new_tokens = 8\n'
    assert main(["data", recipe(tmp_path, rows, more=more), *arguments]) == 1
    assert re.search(f"refused    {words}", capsys.readouterr().out)
    assert main(["data", str(tmp_path / "r.toml"), *arguments, "--rows=1"]) == 0, "others may be shorter"


def test_rows_that_are_all_wrong_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where wrong ones are dropped: nothing is left to train on."""
    assert main(["data", recipe(tmp_path, [{**SOUND, "answer": ""}] * 2), "--data.wrong_rows=drop"]) == 1
    assert "refused    all 2 rows are wrong" in capsys.readouterr().out


def test_names_that_no_process_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a row it is a wrong one, which training does not drop; in a setting, no row is read."""
    rows = [{**SOUND, "own": "math"}, {**SOUND, "own": "mth"}]
    named = ["--data.profile_column=own", "--data.wrong_rows=drop"]
    assert main(["data", recipe(tmp_path, rows), *named]) == 1
    assert "a.parquet', row 1: its profile = 'mth' is unknown; did you mean 'math'?" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "r.toml"), *named, "--reward.verifiers.mth=a.py:verify"]) == 0
    assert main(["data", str(tmp_path / "r.toml"), "--data.environment=zoom"]) == 2
    assert "error: data.environment = 'zoom' is unknown; " in capsys.readouterr().err


def test_demonstrations_and_evaluation_sets_are_read(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its counts and its wrong rows; the rows that a set does not play are not looked at."""
    pq.write_table(pa.Table.from_pylist([SOUND, *[{**SOUND, "answer": ""}] * 2]), tmp_path / "s.parquet")
    pq.write_table(pa.table({"prompt": ["?"] * 3, "completion": ["1", "2", ""]}), tmp_path / "d.parquet")
    more = (
        f'[model]\npath = "{tiny_model_path}"\n[sampling]\nmax_new_tokens = 8\n'
        f'[evaluation.sets.s]\npath = "{tmp_path}/s.parquet"\nnum_prompts = 2\n'
        f'[demonstrations]\npath = "{tmp_path}/d.parquet"\nwrong_rows = "drop"\n'
    )
    assert main(["data", recipe(tmp_path, [SOUND], more=more)]) == 1
    data, learned, played = capsys.readouterr().out.strip().split("\n\n")
    assert data.startswith("data.path '")
    for words in ("demonstrations: data.path '", "rows       3, in 1 file", "learned    median 2, most 2, 4 tokens"):
        assert words in learned, learned
    assert "wrong      1 row, refused or dropped as demonstrations.wrong_rows says:" in learned
    for words in ("evaluation.sets.s: data.path '", "rows       2 of 3, in 1 file", "wrong      1 row, refused:"):
        assert words in played, played
    assert "s.parquet', row 1: column 'answer' holds empty text" in played
    enough = ["--evaluation.sets.s.num_prompts=1"]
    assert main(["data", str(tmp_path / "r.toml"), *enough]) == 0
    assert main(["data", str(tmp_path / "r.toml"), *enough, "--demonstrations.wrong_rows=refuse"]) == 1
    capsys.readouterr()
    assert main(["data", str(tmp_path / "r.toml"), "--evaluation.sets.s.num_prompts=4"]) == 1
    out = capsys.readouterr().out
    assert "rows       1, in 1 file" in out  # the others are shown
    assert "evaluation.sets.s.num_prompts = 4, but data.path '" in out


def test_a_first_row_that_cannot_be_read_is_a_wrong_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report tells the columns by the first row that can be read."""
    (tmp_path / "a.jsonl").write_text('{"problem": "What is\n{"problem": "What is 2 + 3?", "answer": "5"}\n')
    (tmp_path / "r.toml").write_text(f'[run]\nname = "try"\n[data]\npath = "{tmp_path}/a.jsonl"\nwrong_rows = "drop"\n')
    assert main(["data", str(tmp_path / "r.toml")]) == 0
    out = capsys.readouterr().out
    assert "columns    text problem, answer answer" in out
    assert "a.jsonl', row 0: it is not a JSON object" in out


def test_demonstrations_are_counted_as_they_are_learned(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --sft: whole conversations, the tokens of the assistant's, what is too long, and what is wrong and why."""
    text = Renderer.load(tiny_model_path).render_text
    answers = ["5", "17", "6 and so on, at great length" * 40]
    rows = [{"prompt": "Find x.", "completion": each} for each in (*answers, "")]
    more = f'[model]\npath = "{tiny_model_path}"\n[sft]\nmax_tokens = 100\n'
    assert main(["data", recipe(tmp_path, rows, more=more), "--sft"]) == 1
    out = capsys.readouterr().out
    learned = sorted(len(text(each)) + 1 for each in answers[:2])  # and the token that ends the turn
    for line in (
        "rows       4, in 1 file",
        f"learned    median {learned[1]}, most {learned[1]}, {sum(learned)} tokens in all",
        "dropped    1 rows that are too long",
        "wrong      1 row, refused or dropped",
        "a.parquet', row 3: its message 1, the assistant's, is empty",
    ):
        assert line in out, out
    assert "; at most 100" in out
    assert main(["data", str(tmp_path / "r.toml"), "--sft", "--data.wrong_rows=drop", "--rows=1"]) == 0
    assert f"learned    median {learned[0]}, most {learned[0]}, {learned[0]} tokens in all" in capsys.readouterr().out
    assert (
        main(["data", str(tmp_path / "r.toml"), "--data.problem_column=prompt", "--data.answer_column=completion"]) == 1
    )
    assert "learned" not in capsys.readouterr().out


def test_a_page_of_demonstrations_shows_what_the_assistant_says(tmp_path: Path, tiny_model_path: Path) -> None:
    """As the model learns it: an answer as `answer_format` puts it."""
    sheet = tmp_path / "sheet.html"
    more = f'answer_format = "Answer: {{answer}}"\n[model]\npath = "{tiny_model_path}"\n'
    assert main(["data", recipe(tmp_path, [SOUND], more=more), "--sft", "--sheet", str(sheet)]) == 0
    page = Page(sheet.read_text())
    assert page.pictures == 1
    assert "assistant" in page.text
    assert "Answer: 5" in page.text


def test_shares_of_mixed_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In percent of the prompts."""
    pq.write_table(pa.Table.from_pylist([SOUND]), tmp_path / "a.parquet")
    (tmp_path / "r.toml").write_text(
        f'[data.sources.hard]\npath = "{tmp_path}/a.parquet"\nweight = 3\n'
        f'[data.sources.easy]\npath = "{tmp_path}/a.parquet"\n'
    )
    assert main(["data", str(tmp_path / "r.toml")]) == 0
    out = capsys.readouterr().out
    found = re.findall(r"sources\.(\w+)\.path|of prompts (\S+)", out)
    assert found == [("easy", ""), ("", "25.0%"), ("hard", ""), ("", "75.0%")]


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: its text and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.pictures = "", set[str](), 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.pictures += tag == "img" and (dict(attrs)["src"] or "").startswith("data:image/png;base64,")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_of_examples_shows_rows_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text stands as it is in the row; tags in it are text too."""
    sheet = tmp_path / "sheet.html"
    rows = [{**SOUND, "answer": str(number)} for number in range(9)]
    assert main(["data", recipe(tmp_path, rows), "--sheet", str(sheet), "--examples=3"]) == 0
    assert f"examples in {sheet}" in capsys.readouterr().out
    page = Page(sheet.read_text())
    assert page.pictures == 3
    for words in ("Find <b>x</b> & y.", "row 0 · profile geo3k", "row 4 ·", "row 8 ·", "64 × 48 pixels", "<script>"):
        assert words in page.text
    assert not {"b", "script"} & page.tags
    assert "default-src 'none'" in sheet.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.path=/no/such.parquet"], "there is no such file"),
        (["--data.answer_column=solution"], "has no column 'solution'"),
        (
            ["--sheet=/no/folder/x.html"],
            "--sheet /no/folder/x.html cannot be written: there is no folder /no/folder, or it is closed to you; ",
        ),
        (["--sheet=/proc"], "--sheet /proc cannot be written: it is a folder; choose another file"),
        (["--examples=3"], "--examples 3 is for the page of examples; give --sheet FILE as well"),
        (["--model.path=/no/model"], "this folder has no config.json"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, like every command, before the rows are read."""
    assert main(["data", recipe(tmp_path, [SOUND]), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.strip().count("error: ") == 1
