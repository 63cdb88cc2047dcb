"""lmms-eval plays the local task of examples/lmms_eval over the API: `make test-lmms-eval`, which installs it."""

import asyncio
import base64
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.router.openai_harness import Harness
from tests.support.trainer.data.pictures import png

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".lmms-eval/bin/python"
TIMEOUT_S = 600.0

pytestmark = pytest.mark.timeout(700)


async def test_a_local_task_is_played_and_scored(harness: Harness, tmp_path: Path) -> None:
    """Two rows, one with a picture; each is asked once, greedily, and what the policy says is scored."""
    picture = base64.b64encode(png()).decode()
    rows = [
        {"problem": "<image>Find x.", "answer": "3", "image": picture},
        {"problem": "2 + 2?", "answer": "4", "image": ""},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    harness.says(r"It is \boxed{3}.")
    url = f"{harness.routers[0].url}/v1"
    command = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "lmms_eval", "--model", "openai", "--tasks", "penstock_local",
        "--model_args", f"model_version={harness.run},base_url={url},api_key=none,num_concurrent=2",
        "--include_path", ROOT / "examples/lmms_eval", "--output_path", tmp_path / "out", "--log_samples",
        cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(command.communicate(), TIMEOUT_S)
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    assert command.returncode == 0, said.decode()
    found = [*(tmp_path / "out").rglob("*_results.json")]
    assert len(found) == 1, said.decode()  # it exits with 0 after an error, too
    [results] = found
    assert json.loads(results.read_text())["results"]["penstock_local"]["exact_box,none"] == 0.5
    assert sorted(len(request.images) for request in harness.requests) == [0, 1]
    assert {(request.sampling.temperature, request.sampling.max_new_tokens) for request in harness.requests} == {
        (0, 64)
    }
