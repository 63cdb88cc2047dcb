"""Which steps that were begun and not taken leave a recording: those that failed, for their replay."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.flow.batch_source import BatchSource
from services.trainer.replay.recording import recorded_steps
from services.trainer.replay.replay import replay_step, start_of
from services.trainer.replay.run import RecordedRun
from tests.support.trainer.runs.gated_loop import PromptPublication, running
from tests.support.trainer.runs.mixed_run import train
from tests.support.waiting import promptly


def failing(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, call: int) -> None:
    """Have a call of a method, counted from 1, fail by what it was given."""
    original, num_calls = getattr(owner, method), 0

    def fail(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise DataError("advantages must be finite numbers")
        return original(*given)

    monkeypatch.setattr(owner, method, fail)


@pytest.mark.parametrize(
    ("method", "call", "chunks"),
    [("accumulate", 3, (1,)), ("accumulate", 4, (1, 1)), ("finish_step", 2, (1, 1))],
    ids=["first chunk", "second chunk", "update"],
)
def test_a_step_that_the_algorithm_refuses_can_be_replayed(
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: int,
    chunks: Sequence[int],
) -> None:
    """As far as it came: its recording is kept, and a checkpoint of the step before it."""
    with monkeypatch.context() as patch:
        failing(patch, InProcessBackend, method, call=call)
        with pytest.raises(ExceptionGroup, match="unhandled") as caught:
            train(tiny_model_path, tmp_path / "run", None, num_steps=3, records=True)
    assert caught.group_contains(DataError, match="finite numbers")
    run = RecordedRun(tmp_path / "run")
    assert recorded_steps(run.groups) == [1, 2]
    recording = run.recording(2)
    assert recording.inputs.chunks == chunks
    start = start_of(run, 2, model_path=tiny_model_path, scratch=tmp_path)
    replayed = replay_step(start, recording, recording.settings)
    assert replayed.weights_before == recording.inputs.weights
    assert replayed.metrics["num_groups"] == len(chunks)


def test_a_step_whose_other_groups_do_not_come_leaves_no_recording(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed of it did not fail."""

    class Lost(BatchSource):
        async def next_chunk(self, *given: Any) -> Any:
            if self.position.step == 1 and self.ledger.num_committed:
                raise DataError("groups were lost")
            return await super().next_chunk(*given)

    monkeypatch.setattr("tests.support.trainer.runs.mixed_run.BatchSource", Lost)
    with pytest.raises(ExceptionGroup, match="unhandled") as caught:
        train(tiny_model_path, tmp_path / "run", None, num_steps=3, records=True)
    assert caught.group_contains(DataError, match="groups were lost")
    assert recorded_steps(tmp_path / "run" / "groups") == [1]


class NotingRecorder:
    """Notes what it is told."""

    def __init__(self) -> None:
        """It was told nothing."""
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Note a call by its name."""
        return lambda *_: self.told.append(name)


class Publication(PromptPublication):
    """Of the only trainer."""

    class lock:  # noqa: N801 - as the loop calls it
        """Is never lost."""

        @staticmethod
        async def confirm() -> None:
            """It is held."""


async def test_a_step_that_is_stopped_leaves_no_recording(tmp_path: Path) -> None:
    """It is trained when the run goes on, with other groups perhaps."""
    recorder = NotingRecorder()
    async with running(tmp_path, publication=Publication, recorder=recorder) as run:
        run.finish(0)
        assert await run.backend.next_call() == [0]
        run.stop.set()
        run.backend.go_on()
        assert await run.backend.next_call() == "abort_step"
        run.checkpoints.on_disk.set()
        await promptly(run.task)
    assert recorder.told == ["begin", "add", "abort"]
