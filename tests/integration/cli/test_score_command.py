"""`penstock score` as a person uses it: a process of its own, files, pipes, and lines that are wrong."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_alive
from tests.support.reward.process import reward_process
from tests.support.waiting import HANG_S, wait_until

PENSTOCK = Path(sys.executable).parent / "penstock"
COMMAND = (PENSTOCK, "score", "--reward.workers=1")

RIGHT = {"gold": "5", "response": r"so \boxed{5}"}
WRONG = {"gold": "5", "response": r"so \boxed{6}"}


def lines(*rows: object) -> bytes:
    """JSON lines; bytes are taken as they are."""
    return b"".join(row if isinstance(row, bytes) else f"{json.dumps(row)}\n".encode() for row in rows)


Scored = tuple[list[dict[str, Any]], subprocess.CompletedProcess[bytes]]


def run(command: Sequence[str | Path], data: bytes) -> Scored:
    """Run `command` on `data`; return the lines that it wrote."""
    result = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)
    return [json.loads(line) for line in result.stdout.splitlines()], result


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service that runs already."""
    with reward_process("--reward.workers=1") as started:
        yield started.address


@pytest.fixture
def score(address: str) -> Callable[..., Scored]:
    """The command with that service, which takes a quarter of the time that it takes with one of its own."""
    return lambda data, *arguments: run((PENSTOCK, "score", "--address", address, *arguments), data)


def test_verdicts_come_in_the_order_of_the_lines(tmp_path: Path) -> None:
    """With a service of its own, over several windows, some items for a worker; ids come back as they were."""
    slow = {"gold": r"3\sqrt{2}", "response": r"\boxed{\sqrt{18}}"}
    none = {"gold": "5", "response": "I do not know"}
    kinds = [RIGHT, WRONG, slow, none]
    rows = [{"id": n if n % 3 else f"n{n}", **kinds[n % 4]} for n in range(2100)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(*rows))
    written, result = run((*COMMAND, "--profile", "math", source, "--output", output), b"")
    assert (result.returncode, written) == (0, []), result.stderr
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert [row["score"] for row in written] == [1.0, 0.0, 1.0, 0.0] * 525
    assert [row["status"] for row in written[:4]] == ["OK", "OK", "OK", "NO_ANSWER"]
    assert set(written[0]) == {"id", "score", "status", "extracted", "method"}
    assert (written[0]["extracted"], written[0]["method"]) == ("5", "EXACT")
    (summary,) = result.stderr.decode().splitlines()
    for part in ("scored 2100 of 2100 lines", "mean score 0.5000", "1575 OK", "525 NO_ANSWER"):
        assert part in summary


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_standard_input(score: Callable[..., Scored], arguments: tuple[str, ...]) -> None:
    """Without a file, or with `-`, lines come from standard input; the last may lack its end, the first have a mark."""
    written, result = score(b"\xef\xbb\xbf" + lines({"id": "a", **RIGHT}, {"id": "b", **WRONG}).rstrip(), *arguments)
    assert result.returncode == 0, result.stderr
    assert [(row["id"], row["score"]) for row in written] == [("a", 1.0), ("b", 0.0)]


def test_a_service_that_runs_already(score: Callable[..., Scored]) -> None:
    """`--address` asks that service, in more than one window."""
    written, result = score(lines(*({"id": n, **(WRONG if n % 7 else RIGHT)} for n in range(700))))
    assert result.returncode == 0, result.stderr
    assert [(row["id"], row["score"]) for row in written] == [(n, float(n % 7 == 0)) for n in range(700)]


def test_nothing_to_score(score: Callable[..., Scored]) -> None:
    """An empty input, or one of blank lines, is no mistake."""
    for data in (b"", b"\n\r\n  \n"):
        written, result = score(data)
        assert (written, result.returncode) == ([], 0), result.stderr
        assert b"scored 0 of 0 lines" in result.stderr


def test_every_bad_line_is_answered_with_what_is_wrong(score: Callable[..., Scored]) -> None:
    """By file, number, field and remedy; the good lines around it are judged, and the exit code is 1."""
    bad: list[tuple[object, Any, tuple[str, ...]]] = [
        (b"{broken\n", None, ("not JSON", "column 2", "one JSON object per line")),
        (b"[" * 100_000 + b"\n", None, ("not JSON",)),
        (b'{"id": ' + b"1" * 5000 + b"}\n", None, ("not JSON",)),
        (b'{"id": "\xff"}\n', None, ("not UTF-8", "0xff")),
        (b"x" * (16 * 2**20 + 1) + b"\n", None, ("longer than 16777216 bytes",)),
        ([1], None, ("[1]", "JSON object")),
        (RIGHT, None, ('field "id" is missing',)),
        ({"id": 1.5, **RIGHT}, None, ('field "id" = 1.5', "string")),
        ({"id": "c", "response": "5"}, "c", ('field "gold" is missing', "gold answer")),
        ({"id": "d", "gold": 5, "response": "5"}, "d", ('field "gold" = 5', "quote")),
        ({"id": "e", "gold": ["5", None], "response": "5"}, "e", ('field "gold" = ["5", null]',)),
        ({"id": "f", "gold": "5"}, "f", ('field "response" is missing',)),
        ({"id": "g", "gold": "5", "response": None}, "g", ('field "response" = null', "not a string")),
        ({"id": "h", **RIGHT, "profile": "kettle"}, "h", ('field "profile" = "kettle" is unknown', "geo3k")),
        ({"id": "i", **RIGHT, "deadline_s": -1}, "i", ('field "deadline_s" = -1', "seconds > 0")),
        ({"id": "j", **RIGHT, "deadline_s": math.inf}, "j", ('field "deadline_s" = Infinity', "seconds > 0")),
    ]
    written, result = score(lines(*(part for row, _, _ in bad for part in (row, {"id": "good", **RIGHT}))))
    assert result.returncode == 1
    assert [row["score"] for row in written[1::2]] == [1.0] * len(bad)
    for number, (found, (_, name, words)) in enumerate(zip(written[::2], bad, strict=True)):
        assert (found["id"], found["score"], found["status"]) == (name, None, "INVALID")
        for word in (f"<stdin>:{2 * number + 1}: ", *words):
            assert word in found["error"]
    told = result.stderr.decode().splitlines()
    assert "<stdin>:1: not JSON" in told[0]
    assert f"{len(bad) - 5} more" in told[5]
    assert f"scored {len(bad)} of {2 * len(bad)} lines" in told[6]
    assert f"{len(bad)} INVALID" in told[6]


def test_other_fields(score: Callable[..., Scored]) -> None:
    """Golds may be a list, or both fields; a line's own profile counts; what else a line holds is left alone."""
    written, result = score(
        lines(
            {"id": "a", "gold": ["7", "5"], "response": r"\boxed{5}", "note": {"any": 1}},
            {"id": "b", "gold": "7", "golds": ["8", "5"], "response": r"\boxed{5}"},
            {"id": "c", "gold": "62.5", "response": r"\boxed{62.54}", "profile": "geo3k"},
            {"id": "d", "gold": "62.5", "response": r"\boxed{62.54}"},
            {"id": "e", "gold": [], "response": r"\boxed{5}"},
        )
    )
    assert result.returncode == 0, result.stderr
    assert [row["score"] for row in written] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert written[4]["status"] == "GOLD_INVALID"


def test_lone_surrogates_and_nul(score: Callable[..., Scored]) -> None:
    """They neither end the command nor the line; an id that holds one comes back as it was."""
    written, result = score(
        lines(
            {"id": "\ud800", "gold": "5", "response": "\ud800\0\\boxed{5}"},
            {"id": "b", "gold": "\udfff", "response": "\\boxed{5\ud800}", "prompt": "\ud800"},
            b'{"id": "c", "gold": "5", "response": "\xed\xa0\x80 \\\\boxed{5}"}\n',
            {"id": "√", "gold": "√2", "response": "\\boxed{√2}"},
        )
    )
    assert result.returncode == 0, result.stderr
    assert [row["id"] for row in written] == ["\ud800", "b", "c", "√"]
    assert [written[n]["score"] for n in (0, 2, 3)] == [1.0, 1.0, 1.0]
    assert "√" in result.stdout.decode()


def test_verdicts_do_not_wait_for_the_end_of_the_input(address: str) -> None:
    """While a pipe pauses, what came through it is answered."""
    command = (PENSTOCK, "score", "--address", address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for n in range(3):
            process.stdin.write(lines({"id": n, **RIGHT}))
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == n
        process.stdin.close()
        assert process.wait(HANG_S) == 0


def children_of(pid: int) -> set[int]:
    """All processes that `pid` started, and those that they did."""
    found = set[int]()
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, entry.read_text().split()):
                found |= {child} | children_of(child)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted(number: signal.Signals) -> None:
    """A signal ends it with one line, 130, and no process left behind, also while it waits for input."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(lines({"id": "a", **RIGHT}))
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.write(lines({"id": "b", **RIGHT}))
        process.stdin.flush()
        process.stdout.readline()  # so the first line is counted; the second may not be yet
        children = children_of(process.pid)
        assert children
        process.send_signal(number)
        assert process.wait(HANG_S) == 130
        assert re.fullmatch(rb"interrupted: [12] lines are done\n", process.stderr.read())
    wait_until(lambda: not any(map(is_alive, children)))
    assert not any(map(is_alive, children))


def test_a_reader_that_leaves(address: str) -> None:
    """As in `| head -1`: no traceback, and the exit code that a shell gives to a broken pipe."""
    command = (PENSTOCK, "score", "--address", address)
    data = lines(*({"id": n, **RIGHT} for n in range(5000)))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(data)
            process.stdin.close()
        assert process.wait(HANG_S) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.jsonl",), ("nowhere.jsonl", "cannot be read")),
        (("one.jsonl", "two.jsonl"), ("one.jsonl, two.jsonl",)),
        (("--reward.kettle=1",), ("unknown key reward.kettle",)),
        (("--address", "127.0.0.1:9"), ("--address 127.0.0.1:9", "settings")),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """One line on standard error, exit code 2, and nothing written."""
    assert_refused(run((*COMMAND, *arguments), lines({"id": "a", **RIGHT})), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--profile", "kettle"), ("--profile kettle", "geo3k", "math")),
        (("--output", "/nowhere/out.jsonl"), ("/nowhere/out.jsonl", "cannot be written")),
    ],
)
def test_mistakes_that_are_found_once_the_service_runs(
    score: Callable[..., Scored], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """They are told in the same way."""
    assert_refused(score(lines({"id": "a", **RIGHT}), *arguments), words)


def test_a_full_disk(score: Callable[..., Scored]) -> None:
    """One line with what to do, and without verdicts that were not written."""
    words = ("/dev/full cannot be written: No space left on device", "0 lines are done", "make room")
    assert_refused(score(lines({"id": "a", **RIGHT}, {"id": "b", **WRONG}), "--output", "/dev/full"), words)


def assert_refused(scored: Scored, words: tuple[str, ...]) -> None:
    """One line on standard error that has all of `words`."""
    written, result = scored
    assert (written, result.returncode) == ([], 2)
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_nobody_at_the_address() -> None:
    """A service that is not there is named, with what to do."""
    scored = run((PENSTOCK, "score", "--address", "127.0.0.1:9"), lines({"id": "a", **RIGHT}))
    assert_refused(scored, ("error: reward at 127.0.0.1:9", "--address"))


def test_the_input_is_not_overwritten(score: Callable[..., Scored], tmp_path: Path) -> None:
    """`--output` that names the input, by whatever path, is refused while it is whole."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines({"id": "a", **RIGHT}))
    os.link(source, tmp_path / "same.jsonl")
    _, result = score(b"", source, "--output", tmp_path / "same.jsonl")
    assert result.returncode == 2
    assert b"--output" in result.stderr
    assert source.read_bytes() == lines({"id": "a", **RIGHT})


def test_missing_extra_names_the_remedy() -> None:
    """Where the service's packages are not installed, the private service says which extra brings them."""
    script = (
        "import sys; sys.modules['grpc_reflection'] = None; from services.cli import main; sys.exit(main(['score']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 2
    assert "penstock[reward]" in result.stderr
    assert "penstock score" in result.stderr


_ENDLESS = """
import contextlib, threading
from services.cli.score import reward_caller

@contextlib.asynccontextmanager
async def endless():
    yield None
    threading.Event().wait()

reward_caller.END_S = 0.1
with reward_caller.RewardCaller(endless):
    pass
"""


def test_a_service_that_does_not_end_is_left() -> None:
    """Everything is written by then, so nobody has to interrupt the command."""
    result = subprocess.run([sys.executable, "-c", _ENDLESS], capture_output=True, timeout=HANG_S, check=False)
    assert result.returncode == 1
    assert result.stderr == b"error: the reward service did not end within 0.1 s\n"
