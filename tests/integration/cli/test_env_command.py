"""`penstock env` as a person and as a script use it: a process of its own, without model and bus."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from services.cli import main
from tests.support.reward.process import reward_process

PENSTOCK = Path(sys.executable).parent / "penstock"
TABLE = Path(__file__).parents[2] / "data/environments/slime_geo3k.jsonl"
HERE = Path(__file__).parents[3]

RIGHT = '<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>'
WRONG = RIGHT.replace("12", "7")
FINAL = r"It is \boxed{12}."
GOOD = {"id": "a", "gold": "12", "max_turns": 3, "responses": [WRONG, RIGHT, FINAL]}


def env(
    *arguments: str | Path, text: str = "", output: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run the command on `text`."""
    command = (PENSTOCK, "env", *arguments)
    return subprocess.run(
        command, input=text, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A reward service that runs already."""
    with reward_process("--reward.workers=1") as started:
        yield started.address


def lines(*rows: object) -> str:
    return "".join(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows)


def played(*rows: object, arguments: tuple[str | Path, ...]) -> list[dict[str, Any]]:
    result = env("geo3k_tools", *arguments, text=lines(*rows))
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


def steps(*given: tuple[str, bool, float | None]) -> list[dict[str, Any]]:
    return [{"kind": kind, "done": done, "score": score} for kind, done, score in given]


def test_lines_are_played_as_slime_plays_them() -> None:
    """The whole table of slime's outcomes, with a service of the command's own; ids come back in order."""
    table = [json.loads(line) for line in TABLE.read_text().splitlines()]
    wanted = [
        {"id": row["id"], "steps": [step if step["kind"] != "raises" else _NO_CALL for step in row["steps"]]}
        for row in table
    ]
    given = [{key: row[key] for key in ("id", "gold", "max_turns", "responses")} for row in table]
    assert played(*given, arguments=("--compat", "slime", "-")) == wanted


_NO_CALL = {"kind": "no_call", "done": True, "score": None}


def test_lines_are_played_by_our_own_rules(address: str, tmp_path: Path) -> None:
    """From a file too; --max-turns is for lines without a limit, and steps stop at the end."""
    faults = ["<tool_call>{oops</tool_call>", RIGHT.replace("calc_score", "zoom"), FINAL]
    rows = [GOOD, {"id": 7, "gold": ["12"], "responses": [WRONG, WRONG, WRONG]}, {**GOOD, "responses": faults}]
    file = tmp_path / "turns.jsonl"
    file.write_text(lines(*rows))
    first, second, third = played(arguments=(file, "--address", address, "--max-turns", "2"))
    assert first == {"id": "a", "steps": steps(("wrong", False, 0.0), ("right", True, 1.0))}
    assert second == {"id": 7, "steps": steps(("wrong_last_chance", False, 0.0), ("wrong_last_chance", True, 0.0))}
    assert third["steps"] == steps(("malformed", False, None), ("unsupported", False, None), ("no_call", True, 1.0))


BLOCKING = """
from penstock.environments import Observation, StepResult

class Blocking:
    def reset(self, task):
        self.task = task
        return Observation(messages=task.messages)

    def step(self, turn):
        return StepResult(observation=None, reward=self.task.grade(turn.text).score, kind="graded")

    def close(self):
        pass
"""


def test_an_environment_of_plain_functions_is_played_in_its_process(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker plays it; what it says of the turn comes through."""
    (tmp_path / "blocking.py").write_text(BLOCKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = "--worker.environments.mine=blocking:Blocking"
    result = env("mine", mine, "-", "--address", address, text=lines({"id": 1, "gold": "12", "responses": [FINAL]}))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"id": 1, "steps": [{"kind": "graded", "done": True, "score": 1.0}]}


def test_another_environment_is_played_from_lines_too(address: str) -> None:
    """One that names no kinds and gives no reward has neither."""
    result = env("single_turn", "-", "--address", address, text=lines({"id": 1, "gold": "12", "responses": ["a", "b"]}))
    assert json.loads(result.stdout) == {"id": 1, "steps": [{"kind": None, "done": True, "score": None}]}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({**GOOD, "max_turns": 0}, ('"max_turns" = 0', "give an integer >= 1")),
        ({**GOOD, "profile": "maths"}, ("profile 'maths' is unknown", "slime_math")),
        ({**GOOD, "gold": "", "profile": "math"}, ("gold answers ['']", "cannot be read", "correct the row")),
    ],
    ids=["field", "profile", "gold"],
)
def test_a_bad_line_ends_it_with_line_field_value_and_remedy(bad: object, words: tuple[str, ...], address: str) -> None:
    """Exit code 2; the line before is answered, the one behind is not."""
    result = env("geo3k_tools", "-", "--address", address, text=lines(GOOD, "\n", bad, GOOD))
    assert result.returncode == 2
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["a"]
    [error] = result.stderr.splitlines()
    assert error.startswith("error: <stdin>:3: ")
    for word in words:
        assert word in error


def test_a_full_disk(address: str) -> None:
    """One line that says which line's steps are not written, and what to do."""
    with open("/dev/full", "w") as full:
        result = env("geo3k_tools", "-", "--address", address, text=lines(GOOD), output=full)
    assert (result.returncode, result.stderr) == (
        2,
        "error: <stdin>:1: its steps cannot be written to standard output: No space left on device; make room, or "
        "write to another file\n",
    )


def test_a_line_that_is_too_long_is_told() -> None:
    """Nothing of it is kept."""
    result = env("geo3k_tools", "-", text=f'{{"id": "{"a" * 17 * 2**20}"}}\n')
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: <stdin>:1: the line is longer than 16777216 bytes" in result.stderr


def test_a_person_plays_a_question_and_sees_what_the_policy_would_see(address: str, tmp_path: Path) -> None:
    """Tools, messages, and pictures saved as they are; kind, reward and metrics of each turn."""
    picture = tmp_path / "triangle.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n...")
    folder = tmp_path / "seen/here"
    task = ("--question", "How long is AB?", "--gold", "12", "--image", picture, "--pictures", folder)
    result = env("geo3k_tools", *task, "--address", address, text=f"Perhaps 7.\n{WRONG}\n.\n{FINAL}\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert (folder / "0.png").read_bytes() == picture.read_bytes()
    shown = result.stdout.splitlines()
    assert shown[0] == "--- tools"
    assert json.loads(shown[1])["function"]["name"] == "calc_score"
    assert shown[2:5] == ["--- user", f"[picture 0: {folder}/0.png]", "How long is AB?"]
    assert shown[5].startswith("--- wrong: reward 0, num_checks 1")
    assert shown[6] == "--- tool"
    assert shown[7].startswith("Wrong.")
    assert shown[8].startswith("--- no_call: reward 0.5")
    assert shown[9] == "--- the episode ended; reward in all 0.5"


def test_a_person_plays_a_row_of_a_recipe(address: str, tmp_path: Path) -> None:
    """As training reads it; leaving is no error. The episode has as many turns as the recipe gives it."""
    arguments = ("geo3k_tools", "tiny-cpu", "--row", "3", "--pictures", tmp_path, "--address", address)
    result = env(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--- left after 0 turns" in result.stdout
    assert (tmp_path / "0.png").exists()
    result = env(*arguments, "--data.limits.max_turns=1", text=f"{WRONG}\n")
    assert "--- wrong_last_chance: reward 0" in result.stdout
    assert "--- the episode ended" in result.stdout


def test_the_list_has_what_is_built_in_and_what_a_recipe_adds(tmp_path: Path) -> None:
    """A line each; overrides add to it as well."""
    path = "services.rollout.worker.environments.single_turn:SingleTurn"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[worker.environments]\nmine = "{path}"\n')
    result = env("--list", recipe, f"--worker.environments.other={path}")
    assert (result.returncode, result.stderr) == (0, "")
    assert {"geo3k_tools", "mine", "other", "single_turn"} <= {line.split()[0] for line in result.stdout.splitlines()}


def test_it_starts_without_deep_learning_libraries() -> None:
    """Neither torch nor transformers is imported to play lines, and no bus is asked."""
    program = (
        "import sys; from services.cli.app import main; code = main(['env', 'geo3k_tools', '-']); "
        "heavy = {'torch', 'transformers', 'sglang', 'nats'} & set(sys.modules); sys.exit(code or bool(heavy))"
    )
    command = (sys.executable, "-c", program)
    done = subprocess.run(command, input=lines(GOOD), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("give an environment", "geo3k_tools")),
        (("geo3k_toys", "-"), ("environment 'geo3k_toys' is unknown", "geo3k_tools", "--worker.environments.")),
        (("geo3k_tools",), ("give a task", "--row")),
        (("geo3k_tools", "-", "--compat", "verl"), ("compat = 'verl'", "slime")),
        (("single_turn", "-", "--compat", "slime"), ("--compat slime", "single_turn", "leave it out")),
        (("geo3k_tools", "-", "--question", "a"), ("--question", "leave it out")),
        (("geo3k_tools", "--question", "a", "--image", "no.png"), ("--image no.png", "No such file")),
        (("geo3k_tools", "no.jsonl"), ("no.jsonl cannot be read",)),
        (("geo3k_tools", "tiny-cpu", "--row", "99999999"), ("--row 99999999", "give 0 to")),
        (("geo3k_tools", "tiny-cpu", "--row", "0", "--source", "x"), ("--source x", "leave it out")),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is played. In this process, which has imported what the command needs."""
    assert main(["env", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [error] = err.splitlines()
    assert error.startswith("error: ")
    for word in words:
        assert word in error


def test_nobody_at_the_address() -> None:
    """The first line that must be judged ends it, and the error says what to do."""
    result = env("geo3k_tools", "-", "--address", "127.0.0.1:1", text=lines(GOOD))
    assert (result.returncode, result.stdout) == (2, "")
    [error] = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert "start a reward service there" in error
