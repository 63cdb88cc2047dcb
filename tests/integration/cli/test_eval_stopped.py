"""`penstock eval` that is stopped when nothing is left to play."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.testing.engine_process import START_TIMEOUT_S
from tests.support.openai_api import serving_api

_STOPPED_AFTER_THE_LAST_ANSWER = """
import asyncio, os, signal, sys
from services.cli import main
from services.trainer.evaluation.openai_player import OpenAiPlayer
play = OpenAiPlayer.play
async def play_and_hang(*given, **named):
    await play(*given, **named)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()
OpenAiPlayer.play = play_and_hang
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(600)
def test_ctrl_c_after_the_last_answer_leaves_the_results(tmp_path: Path) -> None:
    """While what was kept of the answers is still being written, nothing is left to interrupt."""
    rows = [{"problem": "0?", "answer": "3"}, {"problem": "1?", "answer": "4"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[run]\nname = "r"\ndir = "{tmp_path}/runs"\n[reward]\nworkers = 1\n'
        f'[evaluation.sets.two]\npath = "{tmp_path}/test.jsonl"\nprofile = "math"\nmax_new_tokens = 16\n'
    )
    with serving_api() as api:
        command = [sys.executable, "-c", _STOPPED_AFTER_THE_LAST_ANSWER, "eval", str(recipe), f"--url={api.url}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    [folder] = (tmp_path / "runs").iterdir()
    results = json.loads((folder / "evaluation.json").read_text())
    assert results["sets"]["two"]["score"]["value"] == 0.5
