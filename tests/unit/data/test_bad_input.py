"""Data that a run, an evaluation or supervised training cannot use: each is one line with its remedy, at once."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.telemetry import log
from services.cli import main
from services.cli.evaluation import run as evaluating
from services.launch import launcher
from services.trainer.sft import assembly
from tests.support.trainer.data.hub_server import COMMIT, HubServer, Repo, used_hub

ROWS = b'{"problem": "1 + 1?", "answer": "2"}\n{"problem": "1 + 2?", "answer": "3"}\n'
REPOS = {
    "owner/plain": Repo(commits={COMMIT: {"train.jsonl": ROWS, "test.jsonl": b'{"text": "?", "label_id": 3}\n'}}),
    "owner/gated": Repo(commits={}, refusal="GatedRepo"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on this machine, and a folder with data."""
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"{number} + 1?", "answer": str(number + 1)} for number in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    Path("cut.parquet").write_bytes(Path("rows.parquet").read_bytes()[:-200])
    Path("no-rows.jsonl").write_bytes(b"")
    Path("empty").mkdir()
    Path("middle.jsonl").write_bytes(ROWS + b'{"problem": "1 +\n' + ROWS)
    with used_hub(REPOS, tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would start processes or load weights fails."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(launcher, "launch", start)
    monkeypatch.setattr(evaluating, "serving", start)
    monkeypatch.setattr(assembly, "open_supervised_ranks", start)
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)


def refusal(
    command: str, model: Path, data: str, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2
) -> str:
    """What `penstock train`, `eval` or `sft` ends with, besides bars of downloads; nothing is left of it."""
    evaluates = "[sft]\nvalidate_every = 1" if command == "sft" else "[evaluation]\nat_start = true"
    Path("r.toml").write_text(
        f'[run]\ndir = "runs"\n[model]\npath = "{model}"\n[data]\n{data}\nprofile = "math"\n'
        f"{evaluates}\n[evaluation.sets.s]\n"
    )
    assert main([command, "r.toml", *arguments]) == code
    *bars, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert [bar for bar in bars if bar.strip() and "%|" not in bar and "it/s]" not in bar] == []
    assert not list(Path().glob("runs/*"))
    return line


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('path = "owner/nothing"', ["neither a file or folder here", "check the name, and for a private"]),
        ('path = "owner/gated"', ["is gated; accept its terms", "hf auth login"]),
        ('path = "owner/plain"\nsplit = "val"', ["has no split 'val'; it has test, train"]),
        ('path = "owner/plain"\nsplit = "test"', ["test.jsonl", "problem_column"]),
        ('path = "owner/plain"\nanswer_column = "gold"', ["has no column 'gold'; it has problem, answer"]),
        ('path = "rows.parqet"', ["there is no such file; give a file"]),
        ('path = "rows.parquet"\nimages_column = "picture"', ["has no column 'picture'; it has problem, answer"]),
        ('path = "rows.parquet@[9:]"', ["holds no rows"]),
        ('path = "no-rows.jsonl"', ["no-rows.jsonl", "holds no rows"]),
        ('path = "empty"', ["data.path 'empty'"]),
        ('path = "cut.parquet"', ["cut.parquet", "cannot be read"]),
    ],
)
def test_data_that_cannot_be_used(
    command: str,
    data: str,
    words: list[str],
    hub: HubServer,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names, networks, rights, splits, columns and files."""
    line = refusal(command, tiny_model_path, data, capsys)
    assert [each for each in words if each not in line] == [], line


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_hub_that_cannot_be_reached(
    command: str,
    hub: HubServer,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that fetches the data elsewhere is named; a later start may succeed."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        line = refusal(command, tiny_model_path, 'path = "owner/plain"', capsys, code=1)
    assert "it cannot be reached, and the cache has no complete copy" in line
    assert "hf download" in line


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
@pytest.mark.parametrize(
    ("data", "has"),
    [('path = "rows.parquet"', "data.path 'rows.parquet' has 4 rows"), ("", "the built-in data set has 10000 rows")],
)
def test_an_evaluation_larger_than_its_data(
    command: str,
    data: str,
    has: str,
    hub: HubServer,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the number of rows that there are."""
    line = refusal(command, tiny_model_path, data, capsys, "--evaluation.sets.s.num_prompts=10001")
    assert f"evaluation.sets.s.num_prompts = 10001, but {has}; lower it, or set 0 for all" in line


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_line_that_is_cut_in_the_middle_of_a_file(
    command: str, hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All read their first 5000 rows before they start."""
    line = refusal(command, tiny_model_path, 'path = "middle.jsonl"', capsys)
    assert "middle.jsonl', row 2: it is not a JSON object" in line
    assert line.endswith("repair the line")


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_an_image_bomb(command: str, hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is measured by its header, and never decoded."""
    Path("bomb.jsonl").write_text(json.dumps({"problem": "<image>?", "answer": "2", "images": ["bomb.png"]}))
    Image.new("1", (12_000, 10_000)).save("bomb.png")
    line = refusal(command, tiny_model_path, 'path = "bomb.jsonl"', capsys)
    assert "bomb.jsonl', row 0: image 0: 120000000 pixels (12000 x 10000); a request may have 100000000" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--evaluation.sets.s.path=middle.jsonl"], "evaluation.sets.s: data.path "),
        (["--demonstrations.path=middle.jsonl"], "demonstrations: data.path "),
    ],
    ids=["evaluation set", "demonstrations"],
)
def test_a_cut_line_beside_the_prompts(
    arguments: list[str], words: str, hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluation sets and demonstrations are read too, and named."""
    line = refusal("train", tiny_model_path, 'path = "rows.parquet"', capsys, *arguments)
    assert line.startswith(f"error: {words}")
    assert "middle.jsonl', row 2: it is not a JSON object" in line


def test_a_role_that_is_a_list(hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a wrong row, as any other."""
    row = {"conversations": [{"from": ["human"], "value": "?"}], "answer": "2"}
    Path("listed.jsonl").write_text(json.dumps(row))
    line = refusal("train", tiny_model_path, 'path = "listed.jsonl"', capsys)
    assert "listed.jsonl', row 0: column 'conversations' holds a list with {'role': ['human']" in line


def test_a_row_that_wants_more_tokens_than_the_run_allows(
    hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer would refuse it when it is played."""
    rows = [{"problem": "?", "answer": "2", "own": {"max_new_tokens": number}} for number in (8, 600)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = 'path = "own.jsonl"\nsampling_column = "own"'
    line = refusal("train", tiny_model_path, data, capsys, "--evaluation.at_start=false")
    assert "own.jsonl', row 1: its max_new_tokens = 600 is above sampling.max_new_tokens = 512; raise" in line


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.profile=mth", "data.profile = 'mth' is unknown; did you mean 'math'? known: dapo, "),
        ("--data.environment=calcul", "data.environment = 'calcul' is unknown; did you mean 'calculator'? known: calc"),
        ("--evaluation.sets.s.profile=x", "evaluation.sets.s.profile = 'x' is unknown; known: dapo, "),
        ("--evaluation.sets.s.environment=zoom", "evaluation.sets.s.environment = 'zoom' is unknown; "),
    ],
)
def test_a_name_that_no_process_knows(
    command: str,
    argument: str,
    words: str,
    hub: HubServer,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a profile or an environment, in [data] or in a set: with the similar one, and all."""
    line = refusal(command, tiny_model_path, 'path = "rows.parquet"', capsys, argument)
    assert line.startswith(f"error: {words}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.path=named.jsonl", "--data.profile_column=own"], "data.path "),
        (["--data.path=named.jsonl", "--data.profile_column=own", "--data.wrong_rows=drop"], "data.path "),
        (
            ["--evaluation.sets.s.path=named.jsonl", "--evaluation.sets.s.environment_column=own"],
            "evaluation.sets.s: data.path ",
        ),
    ],
    ids=["prompts", "dropped", "evaluation set"],
)
def test_a_row_with_a_name_that_no_process_knows(
    arguments: list[str],
    words: str,
    hub: HubServer,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trainer does not drop it: it knows neither profiles nor environments."""
    rows = [{"problem": "?", "answer": "2", "own": name} for name in (None, "mth")]
    Path("named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refusal("train", tiny_model_path, 'path = "rows.parquet"', capsys, *arguments)
    assert line.startswith(f"error: {words}")
    assert "named.jsonl', row 1: its " in line
    assert "= 'mth' is unknown; " in line
    assert line.endswith("; repair the row or remove it")


@pytest.mark.parametrize("player", [[], ["--url=http://127.0.0.1:9/v1"]], ids=["a model", "an API"])
@pytest.mark.parametrize("column", ["profile_column", "environment_column"])
def test_a_row_of_an_evaluation_with_a_name_that_no_process_knows(
    column: str, player: list[str], hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine is started and no request made for it."""
    rows = [{"problem": "?", "answer": "2", "own": name} for name in (None, "mth")]
    Path("named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--evaluation.sets.s.path=named.jsonl", f"--evaluation.sets.s.{column}=own", *player]
    line = refusal("eval", tiny_model_path, 'path = "rows.parquet"', capsys, *arguments)
    assert line.startswith("error: evaluation.sets.s: data.path ")
    assert f"row 1: its {column.removesuffix('_column')} = 'mth' is unknown; " in line


def test_a_profile_that_the_reward_service_does_not_know_is_not_asked_of_an_api(
    hub: HubServer, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the set itself."""
    arguments = ["--evaluation.sets.s.profile=mth", "--url=http://127.0.0.1:9/v1"]
    line = refusal("eval", tiny_model_path, 'path = "rows.parquet"', capsys, *arguments)
    assert line.startswith("error: evaluation.sets.s.profile = 'mth' is unknown; did you mean 'math'?")
