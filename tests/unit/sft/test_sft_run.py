"""Whole runs of supervised training: what they learn, keep and continue from."""

import asyncio
import functools
import itertools
import json
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from penstock.errors import ConfigError, DataError, SetupError
from services.cli.sft.run import _Shown
from services.launch.run_folder import RunFolder
from services.launch.settings.service_settings import for_sft
from services.launch.terminal.display import PlainDisplay
from services.launch.terminal.pace import Pace
from services.recipe import Recipe
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import TokenLoss
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.sequences import TrainSequence
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.data.sources import opening
from services.trainer.sft.batches import BatchesAhead, SftBatch
from services.trainer.sft.config import SftSettings
from services.trainer.sft.loop import Observer, SftLoop
from services.trainer.sft.main import train
from services.trainer.telemetry.field_names import FIELD_NAMES
from services.view.run_reader import RunReader
from tests.support.trainer.data.pictures import png
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.leaves_behind("matplotlib keeps the fonts that a thread has used open", "descriptor")


def settings_of(model: Path, **sections: dict[str, Any]) -> SftSettings:
    """A small run on the built-in problems."""
    recipe: dict[str, Any] = {
        "model": {"path": model},
        "data": {"answer_format": r"\boxed{{answer}}"},
        "sft": {"batch_size": 4},
        "trainer": {
            "num_steps": 6,
            "checkpoint_every": 2,
            "keep_checkpoints": 9,
            "device": "cpu",
            "micro_batch_tokens": 100,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "schedule": {"kind": "cosine"}},
        },
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    return for_sft(Recipe.model_validate(recipe))


VALIDATED: dict[str, dict[str, Any]] = {
    "sft": {"batch_size": 4, "validate_every": 3},
    "evaluation": {"sets": {"held_out": {"num_prompts": 5, "answer_format": r"\boxed{{answer}}"}}},
}


def run(settings: SftSettings, folder: Path, *, stop_after: int | None = None) -> list[dict[str, Any]]:
    """Run until the end, or until a stop is asked for after a step; return the rows of the steps."""
    folder.mkdir(exist_ok=True)

    async def main() -> None:
        stop = asyncio.Event()

        class StopAfter(Observer):
            def trained(self, row: dict[str, Any]) -> None:
                if row["step"] == stop_after:
                    stop.set()

        await train(settings, folder, stop, StopAfter())

    asyncio.run(main())
    return lines(folder / "metrics.jsonl")


def lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def weights(folder: Path, step: int) -> bytes:
    """The weights' file of a checkpoint."""
    return (folder / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors").read_bytes()


def numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same, however often a run was interrupted."""
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"], row["epoch"]) for row in rows]


def test_a_run_that_was_stopped_and_resumed_is_the_unbroken_one_to_the_bit(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    """Weights, AdamW's averages, losses, place in the data, validation: stopped twice, once between two checkpoints."""
    settings = settings_of(tiny_model_path, **VALIDATED)
    whole = run(settings, tmp_path / "whole")
    for stop_after in (1, 4, None):
        resumed = run(settings, tmp_path / "broken", stop_after=stop_after)
    assert numbers(resumed) == numbers(whole)
    assert weights(tmp_path / "broken", 6) == weights(tmp_path / "whole", 6)
    validations = [lines(tmp_path / name / "validation.jsonl") for name in ("whole", "broken")]
    unbroken, broken = ([(row["step"], row["validation_loss"]) for row in rows] for rows in validations)
    assert broken == unbroken
    assert [step for step, _ in unbroken] == [0, 3, 6]
    assert unbroken[-1][1] < unbroken[0][1]


def test_a_validation_that_goes_on_is_a_sign_of_life(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run, before its first step too: without one for half an hour, viewers call it stuck."""
    monkeypatch.setattr("services.trainer.sft.validation.SAMPLES_AT_A_TIME", 2)
    measure, file, signs = InProcessSupervisedBackend.measure, tmp_path / "run" / "validation.jsonl", list[float]()

    def measure_for_long(backend: InProcessSupervisedBackend, sequences: Sequence[TrainSequence]) -> TokenLoss:
        signs.append(RunReader(tmp_path / "run").last_change)
        if file.exists():
            os.utime(file, (0, 0))
        return measure(backend, sequences)

    monkeypatch.setattr(InProcessSupervisedBackend, "measure", measure_for_long)
    run(settings_of(tiny_model_path, **VALIDATED), tmp_path / "run", stop_after=1)
    assert [sign > 0 for sign in signs] == [False, True, True]


@pytest.mark.parametrize(
    ("sections", "stop_after", "expected"),
    [
        pytest.param({}, 6, True, marks=pytest.mark.slow),
        pytest.param({}, 5, False, marks=pytest.mark.slow),
        pytest.param(VALIDATED, 6, False, marks=pytest.mark.slow),
        (VALIDATED, None, True),
    ],
)
def test_a_run_says_whether_it_is_complete(
    tiny_model_path: Path, tmp_path: Path, sections: dict[str, Any], stop_after: int | None, expected: bool
) -> None:
    """With its last step, and the validation after it, which a stop interrupts."""
    said: list[bool] = []

    class Listener(Observer):
        def trained(self, row: dict[str, Any]) -> None:
            if row["step"] == stop_after:
                stop.set()

        def ended(self, *, is_complete: bool) -> None:
            said.append(is_complete)

    stop = asyncio.Event()
    asyncio.run(train(settings_of(tiny_model_path, **sections), tmp_path, stop, Listener()))
    assert said == [expected]


def test_steps_that_are_not_shown_at_once_are_shown_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the validation that follows them, and at the end: a person's log has every step."""
    shown = _Shown(PlainDisplay(), RunFolder(tmp_path), Recipe(), Pace(now=itertools.count().__next__))

    def words() -> list[str]:
        return [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]

    for step in (1, 2, 3):
        shown.trained({"step": step, "num_steps": 4, "loss": 1.5})
    assert words() == ["step 1/4"]
    shown.validated({"step": 3, "validation_loss": 1.5, "validation_loss_held_out": 1.5, "validation_s": 0.5})
    assert words() == ["step 2/4", "step 3/4", "validation of step 3"]
    shown.trained({"step": 4, "num_steps": 4, "loss": 1.5})
    shown.catch_up()
    shown.catch_up()
    assert words() == ["step 4/4"]


def test_every_metric_is_explained(tiny_model_path: Path, tmp_path: Path) -> None:
    """On the page of metrics, those under other frameworks' names aside."""
    run(settings_of(tiny_model_path, **VALIDATED), tmp_path / "run", stop_after=1)
    rows = [*lines(tmp_path / "run" / "metrics.jsonl"), *lines(tmp_path / "run" / "validation.jsonl")]
    names = set().union(*rows) - {theirs for names in FIELD_NAMES.values() for theirs in names}
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert {name for name in names if f"`{name.replace('loss_held_out', 'loss_<set>')}`" not in page} == set()


@pytest.mark.slow
def test_what_a_killed_process_did_after_its_checkpoint_is_done_again(tiny_model_path: Path, tmp_path: Path) -> None:
    """Its lines go to another file, its later checkpoint half written goes, and the end is the unbroken run's."""
    settings = settings_of(tiny_model_path, **VALIDATED)
    whole = run(settings, tmp_path / "whole")
    run(settings, tmp_path / "killed", stop_after=4)
    later = {**whole[4], "loss": 9.0}
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n" + json.dumps(later)[:20])
    half = tmp_path / "killed" / "checkpoints" / ".step-000005.x.partial"
    half.mkdir()
    assert numbers(run(settings, tmp_path / "killed")) == numbers(whole)
    assert weights(tmp_path / "killed", 6) == weights(tmp_path / "whole", 6)
    assert not half.exists()
    assert json.loads((tmp_path / "killed" / "metrics-discarded.jsonl").read_text().splitlines()[0])["loss"] == 9.0


def test_grpo_starts_from_a_checkpoint_and_neither_resumes_the_others(tiny_model_path: Path, tmp_path: Path) -> None:
    """`model.path` takes its model folder; a folder of the other kind of run is refused with what to do."""
    settings = settings_of(tiny_model_path, trainer={"num_steps": 2, "optimizer": {}, "device": "cpu"})
    run(settings, tmp_path / "run")
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1).latest()
    assert newest is not None
    backend = InProcessBackend(
        newest.model_path, TrainerConfig(device="cpu"), AlgorithmConfig(), seed=0, temperature=1.0
    )
    backend.load(None)
    again = CheckpointStore(tmp_path / "rl" / "checkpoints", keep=1)
    again.save(3, {"run_id": "x", "version": 3, "ledger": {}}, lambda folder: (folder / "model").mkdir())
    with pytest.raises(SetupError, match=r"of reinforcement learning, which `penstock train --resume` .*--model\.path"):
        run(settings, tmp_path / "rl")


async def test_a_run_that_is_cancelled_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C ends the process: neither its step, the batch that is being read nor a tracker holds it up."""
    released, stepping, closed = threading.Event(), threading.Event(), []

    def read(start: int) -> SftBatch:
        assert not start or released.wait(2 * HANG_S)
        return SftBatch(rendered=[], sequences=[], stop=start + 1, num_passed_over=0)

    def step(sequences: object) -> dict[str, float]:
        stepping.set()
        assert released.wait(2 * HANG_S)
        return {}

    reader: Any = SimpleNamespace(read=read)
    backend: Any = SimpleNamespace(step=step, close=lambda: closed.append("backend"))
    nothing: Any = SimpleNamespace(close=lambda: closed.append("trackers"))
    loop = SftLoop(
        run_id="r",
        folder=tmp_path,
        base_model=tmp_path,
        num_steps=9,
        num_steps_of=[],
        checkpoint_every=9,
        validate_every=0,
        step=0,
        num_samples=0,
        num_rows=9,
        num_too_long=0,
        batches=BatchesAhead(reader, 0),
        backend=backend,
        checkpoints=nothing,
        saved_step=None,
        validation=None,
        metrics=nothing,
        validations=nothing,
        trackers=nothing,
        observer=Observer(),
    )
    monkeypatch.setattr("services.trainer.sft.main.assemble", lambda *_: loop)
    settings: Any = None
    try:
        training = asyncio.create_task(train(settings, tmp_path, asyncio.Event(), Observer()))
        assert await asyncio.to_thread(stepping.wait, HANG_S)
        training.cancel()
        ended, _ = await asyncio.wait({training}, timeout=HANG_S)
        assert (ended, training.cancelled(), closed) == ({training}, True, [])
    finally:
        released.set()


def test_epochs_are_every_row_once_in_an_order_of_their_own(tiny_model_path: Path, tmp_path: Path) -> None:
    """Of seven rows, one too long: two epochs in batches of two are six steps, images and text mixed."""
    (tmp_path / "a.png").write_bytes(png(size=(96, 96)))
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(4)]
    rows += [{"prompt": f"<image>{n}?", "completion": str(n), "images": ["a.png"]} for n in range(2)]
    rows += [{"prompt": "Say much.", "completion": "much " * 99}]
    for row in rows:
        row.setdefault("images", [])
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = settings_of(
        tiny_model_path,
        data={"path": str(file), "answer_format": "", "cache_dir": tmp_path / "cache"},
        sft={"batch_size": 2, "epochs": 2, "max_tokens": 80},
    )
    found = run(settings, tmp_path / "run")
    assert [row["num_steps"] for row in found] == [6] * 6
    assert sum(row["num_passed_over_samples"] for row in found) in (1, 2)  # the last row of an order is not reached
    assert all(row["num_samples"] == 2 and math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in found)


@pytest.mark.slow
def test_epochs_do_not_count_wrong_rows_and_a_run_keeps_their_number(tiny_model_path: Path, tmp_path: Path) -> None:
    """Of six rows, two wrong: two epochs in batches of two are four steps; still so when a row is found too long."""
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(4)]
    rows += [{"prompt": "", "completion": ""}] * 2
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(file), "answer_format": "", "cache_dir": tmp_path / "cache", "wrong_rows": "drop"}
    settings = settings_of(tiny_model_path, data=data, sft={"batch_size": 2, "epochs": 2})
    assert [row["num_steps"] for row in run(settings, tmp_path / "run", stop_after=2)] == [4, 4]
    rows[0]["completion"] = "much " * 99
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = settings_of(tiny_model_path, data=data, sft={"batch_size": 2, "epochs": 2, "max_tokens": 80})
    assert [row["num_steps"] for row in run(settings, tmp_path / "run")] == [4] * 4
    assert run(settings, tmp_path / "another", stop_after=1)[0]["num_steps"] == 3


@pytest.mark.slow
def test_epochs_are_every_row_once_whatever_batches_a_run_goes_on_with(tiny_model_path: Path, tmp_path: Path) -> None:
    """Of eight rows, four are learned in two steps; two more one by one; and the last two in one step."""
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "answer_format": "", "cache_dir": tmp_path / "cache"}
    for batch_size, stop_after in ((2, 2), (1, 4), (2, None)):
        settings = settings_of(tiny_model_path, data=data, sft={"batch_size": batch_size, "epochs": 1})
        found = run(settings, tmp_path / "run", stop_after=stop_after)
    assert [row["num_steps"] for row in found] == [4, 4, 6, 6, 5]
    assert [row["num_samples"] for row in found] == [2, 2, 1, 1, 2]
    assert found[-1]["epoch"] == 1


@pytest.mark.slow
def test_a_run_of_an_earlier_release_has_the_epochs_that_are_left(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints count rows, also those too long: half of twelve, so an epoch is three steps."""
    save = CheckpointStore.save

    def save_as_before(store: CheckpointStore, step: int, state: dict[str, Any], write: Any) -> Any:
        return save(store, step, {key: value for key, value in state.items() if key != "num_samples"}, write)

    monkeypatch.setattr(CheckpointStore, "save", save_as_before)
    rows = [{"prompt": f"Say {n}.", "completion": "much " * 99 if n % 2 == 0 else str(n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "answer_format": "", "cache_dir": tmp_path / "cache"}
    for epochs in (1, 2):
        sft = {"batch_size": 2, "epochs": epochs, "max_tokens": 80}
        found = run(settings_of(tiny_model_path, data={**data, "shuffle": False}, sft=sft), tmp_path / "run")
    assert [row["num_steps"] for row in found] == [3, 3, 3, 6, 6, 6]


def test_a_wrong_row_costs_no_step_before_it(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are not read before the start: the run goes on with its batch when the row is corrected."""
    monkeypatch.setattr("services.trainer.data.dataset.MAX_CHECKED_ROWS", 0)
    monkeypatch.setattr("services.trainer.data.dataset.Dataset.check", lambda *_, **__: None)
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(5)] + [{"prompt": "a", "completion": ""}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(file), "answer_format": "", "cache_dir": tmp_path / "cache", "shuffle": False}
    sections = {"data": data, "sft": {"batch_size": 2}, "trainer": {"num_steps": 3, "checkpoint_every": 99}}
    settings = settings_of(tiny_model_path, **sections)
    with pytest.raises(DataError, match=r"rows\.jsonl', row 5"):
        run(settings, tmp_path / "run")
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000002"
    rows[-1]["completion"] = "b"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step"] for row in run(settings, tmp_path / "run")] == [1, 2, 3]


def test_a_batch_in_tokens_is_as_many_samples_as_fit(tiny_model_path: Path, tmp_path: Path) -> None:
    """Built-in problems have 39 or 40 tokens: three fit into 120."""
    settings = settings_of(tiny_model_path, sft={"batch_size": 121, "batch_unit": "tokens"})
    for row in run(settings, tmp_path / "run"):
        assert row["num_samples"] == 3
        assert row["sequence_tokens_mean"] * 3 <= 121


def test_samples_that_are_all_too_long_end_the_run_with_the_remedy(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the built-in problems, which are not read before."""
    monkeypatch.setattr(opening, "built_in", functools.partial(opening.built_in, num_rows=50))
    settings = settings_of(tiny_model_path, sft={"max_tokens": 20})
    with pytest.raises(DataError, match=r"too long or wrong"):
        run(settings, tmp_path / "run")


def test_a_schedule_that_does_not_fit_into_the_epochs_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """The steps of the epochs are named."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = {"path": str(tmp_path / "rows.jsonl"), "answer_format": "", "cache_dir": tmp_path / "cache"}
    settings = settings_of(tiny_model_path, data=data, sft={"batch_size": 1, "epochs": 2})
    with pytest.raises(ConfigError, match=r"sft\.epochs = 2 makes 2 steps of 1 rows: trainer\.optimizer\.warmup"):
        run(settings, tmp_path / "run")


def test_long_rows_are_counted_in_a_warning(tiny_model_path: Path, tmp_path: Path) -> None:
    """Nothing is cut, and nothing disappears in silence."""
    texts = ["b", "much " * 99]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in texts)
    )
    data = {"path": str(tmp_path / "rows.jsonl"), "answer_format": "", "cache_dir": tmp_path / "cache"}
    settings = settings_of(tiny_model_path, data=data, sft={"batch_size": 1, "max_tokens": 80})
    with structlog.testing.capture_logs() as logs:
        run(settings, tmp_path / "run", stop_after=1)
    [warning] = [entry for entry in logs if entry["event"] == "data.overlong_prompts_dropped"]
    assert (warning["num_rows"], warning["log_level"]) == (1, "warning")
