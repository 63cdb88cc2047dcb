"""Demonstrations beside groups in the training loop: both are learned, and a run goes on where it was killed."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import DataError
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.config import BackendConfig
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.sft.batches import BatchesAhead, BatchReader
from services.trainer.starting_point import StartingPoint
from services.trainer.telemetry.field_names import FIELD_NAMES
from tests.support.trainer.runs.gated_loop import running
from tests.support.trainer.runs.mixed_run import samples_of, train
from tests.support.trainer.runs.training_loops import UNUSED
from tests.support.waiting import promptly
from tests.unit.trainer.telemetry.test_metrics_page import explained

BUILT_IN = DemonstrationsConfig.model_validate(
    {"sources": {"a": {"answer_format": r"\boxed{{answer}}"}}, "samples_per_step": 3, "coef": 0.5}
)


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run."""
    checkpoint = CheckpointStore(folder / "checkpoints", keep=99).latest()
    assert checkpoint is not None
    return checkpoint


def checkpoint_of(folder: Path, step: int) -> Checkpoint:
    """One of a run's checkpoints."""
    checkpoint = CheckpointStore(folder / "checkpoints", keep=99).newest(before=step + 1)
    assert checkpoint is not None
    assert checkpoint.step == step
    return checkpoint


def preference(model: Path, weights: Path) -> float:
    """By how much a token of a right sample is likelier than one of a wrong sample, in nats."""
    backend = InProcessSupervisedBackend(weights, BackendConfig(device="cpu"), seed=0)
    backend.load(None)
    right, wrong = (backend.measure(samples_of(model, reward=reward)).mean for reward in (1.0, 0.0))
    return wrong - right


def numbers(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same, however often a run was killed."""
    names = ("step", "loss", "grad_norm", "demonstration_cross_entropy", "num_demonstration_tokens")
    return [tuple(row[name] for name in names) for row in rows]


def weights_file(checkpoint: Checkpoint) -> bytes:
    """Its weights, to the bit."""
    return (checkpoint.model_path / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_demonstrations_are_learned_while_the_policy_learns_from_rewards(tiny_model_path: Path, tmp_path: Path) -> None:
    """Their cross-entropy falls, which it does not without them, and right samples become likelier than wrong ones."""
    rows = train(tiny_model_path, tmp_path / "mixed", BUILT_IN, num_steps=16)
    entropies = [row["demonstration_cross_entropy"] for row in rows]
    assert entropies[-1] < 0.6 * entropies[0]
    before = preference(tiny_model_path, tiny_model_path)
    assert preference(tiny_model_path, newest(tmp_path / "mixed").model_path) > before + 0.05
    assert all(row["skipped"] == 0 and row["num_steps_without_gradient"] == 0 for row in rows)
    assert all(row["loss"] == pytest.approx(row["policy_loss"] + row["ce_loss"], abs=1e-4) for row in rows)
    assert [row["num_demonstrations"] for row in rows] == [3] * 16
    assert rows[-1]["demonstration_epoch"] == pytest.approx(48 / 10_000)
    assert all(row["num_chunks"] == 2 for row in rows)


def test_every_metric_of_demonstrations_is_explained(tiny_model_path: Path, tmp_path: Path) -> None:
    """On the page of metrics."""
    [row] = train(tiny_model_path, tmp_path, BUILT_IN, num_steps=1)
    theirs = {name for names in FIELD_NAMES.values() for name in names} | {"weights_digest"}
    own = [name for name in row if name not in theirs]
    assert [name for name in own if not any(re.fullmatch(pattern, name) for pattern in explained())] == []


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_unbroken_one_to_the_bit(
    tiny_model_path: Path, tmp_path: Path, step: int
) -> None:
    """Whatever the killed trainer did after it: the same demonstrations, losses and weights."""
    whole = train(tiny_model_path, tmp_path / "whole", BUILT_IN)
    checkpoint = checkpoint_of(tmp_path / "whole", step)
    assert checkpoint.state["demonstration_position"] == 3 * step
    again = train(tiny_model_path, tmp_path / "again", BUILT_IN, checkpoint=checkpoint)
    assert numbers(again) == numbers(whole[step:])
    assert weights_file(newest(tmp_path / "again")) == weights_file(newest(tmp_path / "whole"))
    assert newest(tmp_path / "again").state["demonstration_position"] == 18


def test_the_seed_decides_which_demonstrations_a_step_learns(tiny_model_path: Path, tmp_path: Path) -> None:
    """The same again under the same seed, others under another; and none without the section."""
    seeds = {"one": 0, "again": 0, "other": 1}
    rows = [train(tiny_model_path, tmp_path / name, BUILT_IN, num_steps=1, seed=seed) for name, seed in seeds.items()]
    found = [row["demonstration_cross_entropy"] for [row] in rows]
    assert found[0] == found[1] != found[2]
    [row] = train(tiny_model_path, tmp_path / "none", None, num_steps=1)
    assert not any("demonstration" in name for name in row if name != "demonstration_wait_s")
    assert "ce_loss" not in row


def test_a_run_without_demonstrations_so_far_begins_with_the_first(tiny_model_path: Path, tmp_path: Path) -> None:
    """From a checkpoint of a run without the section, and from one of an earlier release, which has no position."""
    train(tiny_model_path, tmp_path / "before", None, num_steps=2)
    checkpoint = newest(tmp_path / "before")
    rows = train(tiny_model_path, tmp_path / "after", BUILT_IN, num_steps=3, checkpoint=checkpoint)
    assert [row["step"] for row in rows] == [3]
    assert newest(tmp_path / "after").state["demonstration_position"] == 3
    state = {name: value for name, value in checkpoint.state.items() if name != "demonstration_position"}
    old = Checkpoint(step=2, path=checkpoint.path, state=state)
    start = StartingPoint(run_id="run", folder=tmp_path, checkpoints=UNUSED, checkpoint=old, versions=UNUSED)
    assert start.demonstration_position == 0


def test_a_wrong_row_ends_the_run_when_a_step_comes_to_it(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are not read before the start; the error names section and row, and the step before is kept."""
    monkeypatch.setattr("services.trainer.data.dataset.MAX_CHECKED_ROWS", 0)
    monkeypatch.setattr("services.trainer.data.dataset.Dataset.check", lambda *_, **__: None)
    rows = [{"prompt": "a", "completion": text} for text in ("b", "c", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DemonstrationsConfig(
        path=str(tmp_path / "rows.jsonl"), shuffle=False, samples_per_step=2, cache_dir=tmp_path / "cache"
    )
    with pytest.raises(ExceptionGroup) as caught:
        train(tiny_model_path, tmp_path / "run", config)
    [error] = caught.value.exceptions
    assert isinstance(error, DataError)
    assert re.match(r"demonstrations: data\.path '.*rows\.jsonl', row 2: ", str(error))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert newest(tmp_path / "run").step == 1


class Numbers(BatchReader):
    """Each demonstration is its position, and a batch has two."""

    def __init__(self) -> None:
        dataset: Any = SimpleNamespace(num_rows=10, playable=lambda position: position)
        reader: Any = SimpleNamespace(render=lambda position: position, expand=lambda position: position)
        super().__init__(dataset, reader, batch_size=2)


async def test_a_step_that_is_given_up_leaves_its_demonstrations_to_the_next(tmp_path: Path) -> None:
    """A stop while groups are awaited: the position stays, although the batch was read."""
    ahead = BatchesAhead(Numbers(), 0)
    async with running(tmp_path, demonstrations=ahead) as run:
        run.finish(0, 1, 2, 3)
        for what in ([0, 1, 2, 3], [0, 1], "finish_step"):
            assert await run.backend.next_call() == what
            if what != [0, 1]:
                run.backend.go_on()
        run.finish(4)
        assert await run.backend.next_call() == [4]
        assert ahead.position == 2
        run.stop.set()
        run.backend.go_on()
        assert await run.backend.next_call() == "abort_step"
        run.checkpoints.on_disk.set()
        await promptly(run.task)
        assert (run.position.step, ahead.position) == (1, 2)
    await ahead.close()
