"""docs/reward/service.md says what is so: its examples are run as they stand."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reward.process import RewardProcess, reward_process

PAGE = (Path(__file__).parents[3] / "docs/reward/service.md").read_text()
PENSTOCK = Path(sys.executable).parent / "penstock"


@pytest.fixture(scope="module")
def service() -> Iterator[RewardProcess]:
    """One service for all examples."""
    with reward_process("--reward.workers=1") as started:
        yield started


def with_addresses(text: str, service: RewardProcess) -> str:
    """`text` with the addresses of `service` for those of the page."""
    return text.replace("127.0.0.1:7002", service.address).replace("http://127.0.0.1:7003", service.url)


def section(title: str) -> str:
    """The text under a heading, to the next one of any level."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def indented(text: str) -> list[str]:
    """The indented blocks of `text`, in order."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]


def fenced(text: str) -> str:
    """The one Python block of `text`."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(code)


def test_python(service: RewardProcess) -> None:
    """The program runs and prints what the page says."""
    text = section("Python")
    code = with_addresses(fenced(text), service)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert result.stdout == indented(text.partition("```\n")[2])[0], result.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are made with curl")
def test_http(service: RewardProcess) -> None:
    """The answer is that of the page, but for the time that it took."""
    command, expected = indented(section("HTTP"))
    answer = subprocess.run(
        with_addresses(command, service), shell=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert {**json.loads(answer), "elapsed_s": 0} == {**json.loads(expected), "elapsed_s": 0}


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are made with curl")
def test_moving_over(service: RewardProcess) -> None:
    """slime gets a bare number and the status in a header, OpenRLHF its three lists."""
    slime, openrlhf = (
        subprocess.run(with_addresses(command, service), shell=True, capture_output=True, text=True, timeout=200).stdout
        for command in indented(section("Moving over"))
    )
    head, _, body = slime.partition("\n\n")
    assert json.loads(body) == 1.0
    assert "x-penstock-status: ok" in head.lower()
    answer = json.loads(openrlhf)
    assert (answer["rewards"], answer["scores"]) == ([1.0], [1.0])
    assert "extra_logs" in answer


def test_files(tmp_path: Path) -> None:
    """The lines in give the lines out."""
    command, lines, expected = indented(section("Files"))
    (tmp_path / "answers.jsonl").write_text(lines)
    command = command.replace("penstock", str(PENSTOCK), 1)
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "verdicts.jsonl").read_text() == expected


def test_own_verifier(tmp_path: Path) -> None:
    """The function is a profile, by the option that the page gives."""
    text = section("Your own verifier")
    (tmp_path / "exact.py").write_text(fenced(text))
    option = next(word for word in text.split() if word.startswith("--reward.verifiers."))
    settings = ("--reward.workers=1", "--reward.deadline_s=30", option.replace("./", f"{tmp_path}/"))
    with reward_process(*settings) as started:
        rows = [{"id": n, "gold": "5", "response": answer, "profile": "exact"} for n, answer in enumerate(("5\n", "6"))]
        result = subprocess.run(
            [PENSTOCK, "score", "--address", started.address],
            input="".join(f"{json.dumps(row)}\n" for row in rows),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert [json.loads(line)["score"] for line in result.stdout.splitlines()] == [1.0, 0.0], result.stderr


def test_scale_in_a_recipe(tmp_path: Path) -> None:
    """The section for a profile's scale is one that the service reads."""
    (tmp_path / "scale.toml").write_text(indented(section("Profiles"))[0])
    row = {"id": 0, "gold": "5", "response": r"<think>so</think> \boxed{5}"}
    result = subprocess.run(
        [PENSTOCK, "score", "--config", tmp_path / "scale.toml"],
        input=f"{json.dumps(row)}\n{json.dumps({**row, 'response': 'no'})}\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert [json.loads(line)["score"] for line in result.stdout.splitlines()] == [1.0, -1.0], result.stderr
