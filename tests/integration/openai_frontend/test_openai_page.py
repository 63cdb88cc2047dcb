"""docs/rollouts/openai.md says what is so: its examples run as they stand, and no setting or refusal is missing."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from services.router.frontends.openai.schema.base import REFUSED
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest
from tests.support.router.openai_harness import PNG, Harness
from tests.support.waiting import promptly

PAGE = (Path(__file__).parents[3] / "docs/rollouts/openai.md").read_text()


def section(title: str) -> str:
    """The text under a heading, to the next one of its level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def programs(title: str) -> list[str]:
    """The Python programs of a section."""
    return re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)


def commands(title: str) -> list[str]:
    """The curl commands of a section."""
    blocks = re.findall(r"(?:^    .*\n)+", section(title), re.MULTILINE)
    return [block for block in blocks if "curl" in block]


def placed(text: str, harness: Harness) -> str:
    """The example with the harness's address and model for those of the page."""
    return text.replace("http://127.0.0.1:7080", harness.routers[0].url).replace('"policy"', f'"{harness.run}"')


async def run_python(code: str, harness: Harness) -> str:
    """What the program prints, in a process of its own: this one's servers print their logs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", placed(code, harness), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await promptly(process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def run_command(command: str, harness: Harness) -> Any:
    """The JSON that the command prints."""
    process = await asyncio.create_subprocess_exec("sh", "-c", placed(command, harness), stdout=asyncio.subprocess.PIPE)
    output, _ = await promptly(process.communicate())
    assert process.returncode == 0
    return json.loads(output)


async def test_python(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that ask print what the policy says; the one with an image shows it."""
    monkeypatch.chdir(tmp_path)
    Path("triangle.png").write_bytes(PNG)
    harness.says("It is \\boxed{5}")
    whole, streamed = [await run_python(code, harness) for code in programs("Ask")]
    assert re.search(r"^It is \\boxed\{5\} policy-[34]$", whole, re.MULTILINE)
    assert "It is \\boxed{5}\n" in streamed
    assert [[image.data for image in request.images] for request in harness.requests if request.images] == [[PNG]]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are made with curl")
async def test_curl_and_recording(harness: Harness) -> None:
    """An answer; and what the recording program left is given back by the command below it."""
    [ask], [record], [read] = commands("Ask"), programs("Record for training"), commands("Record for training")
    answer = await run_command(ask, harness)
    assert answer["choices"][0]["message"]["content"] == "fine"
    await run_python(record, harness)
    [call] = (await run_command(read, harness))["data"]
    assert call["text"] == "fine"
    for name in call:
        assert f"`{name}`" in PAGE or name in ("session_id", "request_id", "choice", "created", "num_prompt_tokens")


def test_parameters() -> None:
    """Each parameter that is taken is on the page."""
    for model in (ChatRequest, CompletionRequest):
        for name in model.model_fields:
            assert f"`{name}" in PAGE or name == "model", name
    for name in ("logit_bias", "best_of", "suffix", "min_p", "skip_special_tokens", "chat_template", "stop_regex"):
        assert name in REFUSED
        assert f"`{name}`" in section("What is taken and what is refused")
