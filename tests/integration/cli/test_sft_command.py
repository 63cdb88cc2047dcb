"""`penstock sft` as a process: what it prints and writes, kill -9 of it and of a rank, Ctrl-C, mistakes."""

import asyncio
import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.config import load
from penstock.telemetry import log
from services.cli import main
from services.launch import run_folder
from services.recipe import Recipe
from services.trainer.sft.loop import Observer
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.families import heard, random_qwen3_5, write_model
from tests.support.waiting import wait_until

PENSTOCK = Path(sys.executable).parent / "penstock"


class SftCommand:
    """A `penstock sft` on the built-in problems."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [PENSTOCK, "sft", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )

    def wait_for_step(self, folder: Path, step: int) -> None:
        """Wait until it has taken this step; not every step is printed."""
        wait_until(lambda: self.process.poll() is not None or num_steps(folder) >= step, timeout_s=180.0)
        assert self.process.poll() is None, self.process.communicate()
        assert num_steps(folder) >= step

    def kill_rank_1(self) -> None:
        """Kill -9 the process that computes as the second of two ranks."""
        children = psutil.Process(self.process.pid).children()
        [rank] = [each for each in children if "services.trainer.backend.ranks.follower" in each.cmdline()]
        rank.kill()

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end: exit code, the rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out, err


@pytest.fixture
def recipe(tiny_model_path: Path, tmp_path: Path) -> Path:
    """Twelve small steps."""
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'run.name = "t"\nrun.dir = "{tmp_path}"\nmodel.path = "{tiny_model_path}"\n'
        'data.answer_format = "{answer}"\nsft.batch_size = 4\n'
        'trainer.num_steps = 12\ntrainer.checkpoint_every = 2\ntrainer.device = "cpu"\n'
        "trainer.optimizer.learning_rate = 1e-3\n"
    )
    return file


def num_steps(folder: Path) -> int:
    """Taken so far."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> bytes:
    """Of the last step."""
    return (folder / "checkpoints/step-000012/model/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_and_interrupted_runs_end_as_the_one_that_was_left_alone(recipe: Path, tmp_path: Path) -> None:
    """kill -9 in a step, then Ctrl-C, which finishes the step, saves it and exits with 130; then to the end."""
    whole = SftCommand(recipe, f"--run.folder={tmp_path / 'whole'}")
    broken = SftCommand(recipe, f"--run.folder={tmp_path / 'broken'}")
    broken.wait_for_step(tmp_path / "broken", 3)
    broken.process.kill()
    broken.finish()
    num_taken = num_steps(tmp_path / "broken")
    assert not (tmp_path / "broken/checkpoints/step-000012").exists()

    resumed = SftCommand("--resume", tmp_path / "broken", "--trainer.keep_checkpoints=7")
    resumed.wait_for_step(tmp_path / "broken", max(5, num_taken + 1))
    resumed.process.send_signal(signal.SIGINT)
    code, out, err = resumed.finish()
    last = rows(tmp_path / "broken")[-1]["step"]
    assert (code, err) == (130, "")
    assert 5 <= last < 12
    assert f"model {tmp_path}/broken/checkpoints/step-{last:06d}/model" in out

    assert load(Recipe, [tmp_path / "broken/config.toml"]).trainer.keep_checkpoints == 7
    assert SftCommand("--resume", tmp_path / "broken").finish()[0] == 0
    code, out, err = whole.finish()
    assert (code, err) == (0, "")
    assert "step 12/12  loss " in out
    for ours, theirs in zip(rows(tmp_path / "broken"), rows(tmp_path / "whole"), strict=True):
        assert (ours["step"], ours["loss"], ours["grad_norm"]) == (theirs["step"], theirs["loss"], theirs["grad_norm"])
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert (tmp_path / "whole/curves.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_loses_a_rank_ends_and_resumed_ends_as_the_one_that_was_left_alone(
    recipe: Path, tmp_path: Path
) -> None:
    """kill -9 of one of two ranks: it ends with the reason; `--resume` starts both ranks again."""
    ranks = "--trainer.ranks=2"
    code, _, err = SftCommand(recipe, f"--run.folder={tmp_path / 'whole'}", ranks).finish()
    assert (code, err) == (0, "")
    broken = SftCommand(recipe, f"--run.folder={tmp_path / 'broken'}", ranks)
    broken.wait_for_step(tmp_path / "broken", 3)
    broken.kill_rank_1()
    code, _, err = broken.finish()
    assert code == 1
    assert "error: rank 1 was killed by signal 9; the trainer ends, and continues from its last checkpoint" in err
    assert not (tmp_path / "broken/checkpoints/step-000012").exists()

    code, out, err = SftCommand("--resume", tmp_path / "broken").finish()
    assert (code, err) == (0, "")
    assert ", from step " in out
    for ours, theirs in zip(rows(tmp_path / "broken"), rows(tmp_path / "whole"), strict=True):
        assert (ours["step"], ours["loss"], ours["grad_norm"]) == (theirs["step"], theirs["loss"], theirs["grad_norm"])
    ours, theirs = (tensors_of(tmp_path / name / "checkpoints/step-000012/model") for name in ("broken", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_family_with_linear_attention_trains_alike_on_one_rank_and_on_two(recipe: Path, tmp_path: Path) -> None:
    """Qwen3.5, several samples a row; and transformers loads what was written."""
    from transformers import AutoModelForImageTextToText

    path = write_model(heard(random_qwen3_5(), std_of_embedding=0.3), tmp_path / "qwen3_5")
    for num_ranks in (1, 2):
        folder = tmp_path / f"ranks-{num_ranks}"
        code, _, err = SftCommand(
            recipe, f"--run.folder={folder}", f"--model.path={path}", f"--trainer.ranks={num_ranks}"
        ).finish()
        assert (code, err) == (0, "")
    alone, together = (rows(tmp_path / f"ranks-{num_ranks}") for num_ranks in (1, 2))
    assert len(alone) == 12
    assert alone[-1]["loss"] < alone[0]["loss"]
    for one, other in zip(alone, together, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert alone[0]["grad_norm"] == pytest.approx(together[0]["grad_norm"], rel=1e-4)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "ranks-2/checkpoints/step-000012/model")
    assert model.config.model_type == "qwen3_5"


@pytest.mark.parametrize(("is_complete", "code"), [(True, 0), (False, 130)])
def test_a_signal_after_all_is_done_has_interrupted_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool, code: int
) -> None:
    """As Ctrl-C while the curves are drawn."""

    async def train(_: object, __: Path, stop: asyncio.Event, observer: Observer) -> None:
        observer.ended(is_complete=is_complete)
        signal.raise_signal(signal.SIGINT)
        await stop.wait()

    monkeypatch.setattr("services.cli.sft.run.train_supervised", train)
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)  # its file is open until a process ends
    assert main(["sft", str(recipe), f"--run.folder={tmp_path / 'run'}"]) == code


@pytest.mark.slow
def test_a_terminal_that_goes_away_ends_the_run_in_order(recipe: Path, tmp_path: Path) -> None:
    """As Ctrl-C does, though nothing can be printed any more."""
    run = SftCommand(recipe, f"--run.folder={tmp_path / 'run'}", "--trainer.num_steps=1000")
    run.wait_for_step(tmp_path / "run", 2)
    assert run.process.stdout is not None
    run.process.stdout.close()
    run.process.send_signal(signal.SIGHUP)
    code, _, err = run.finish()
    assert (code, err) == (130, "")
    last = rows(tmp_path / "run")[-1]["step"]
    assert last < 1000
    assert (tmp_path / f"run/checkpoints/step-{last:06d}").exists()


def test_a_full_disk_at_the_start_is_one_line(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, the remedy, no run folder."""

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_atomically", write)
    assert main(["sft", str(recipe)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "No space left on device; " in line
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The override that was refused is not kept: without it, the run goes on."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = [f"--data.path={tmp_path}/rows.jsonl", "--data.answer_format=", f"--data.cache_dir={tmp_path}/cache"]
    settings = load(Recipe, [recipe], data)
    folder = run_folder.RunFolder.create(settings.run)
    folder.write_config(settings)
    before = folder.config_file.read_bytes()
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)  # its file is open until a process ends
    assert main(["sft", "--resume", str(folder.path), "--sft.max_tokens=1"]) == 2
    assert "raise sft.max_tokens" in capfd.readouterr().err
    assert folder.config_file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.answer_format=x"], "data: answer_format = 'x' has no {answer}"),
        (["--evaluation.every=3", "--evaluation.sets.a.num_prompts=3"], "sft.validate_every"),
        (["--resume=/nowhere"], "brings its own recipe"),
        (["--sft.batch_sise=3"], "did you mean sft.batch_size"),
        (["--data.path=rows.jsonl", "--data.answer_format="], "row 1: it has no assistant message"),
        (["--sft.max_tokens=9", "--data.path=rows.jsonl@[:1]", "--data.answer_format="], "raise sft.max_tokens"),
        (
            [
                "--data.path=rows.jsonl@[:1]",
                "--data.answer_format=",
                "--sft.epochs=1",
                "--trainer.optimizer.warmup_steps=9",
                "--trainer.optimizer.schedule.kind=cosine",
            ],
            "sft.epochs = 1 makes 1 steps of 1 rows",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    recipe: Path,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, the remedy, no traceback, no run folder."""
    ask, answer = {"role": "user", "content": "Find x."}, {"role": "assistant", "content": "5"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in ([ask, answer], [ask])))
    given = [argument.replace("rows.jsonl", str(tmp_path / "rows.jsonl")) for argument in arguments]
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)  # its file is open until a process ends
    code = main(["sft", str(recipe), *given])
    err = capfd.readouterr().err
    assert code == 2, err
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
