"""Computes a recorded step again.

Invariant: in the environment of the recording, the same settings give the same bits: loss, gradient norm and weights.
A step reads only the weights, the optimizer's state, torch's random state, the groups in their order and chunks,
the demonstrations, the published version and its settings. Its packed rows follow from these.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from penstock.errors import InvalidRequestError, SetupError
from penstock.model import hub
from services.trainer.admission.filters import FilterReason, screen
from services.trainer.admission.gate import is_too_old
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.environment import Environment, computing_threads
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup, TrainSequence, open_reader
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.replay.recording import Recording
from services.trainer.replay.run import TEMPORARY_ROOM, RecordedRun
from services.trainer.replay.settings import StepSettings
from services.trainer.sft.sequences import DemonstrationReader

log = structlog.get_logger()

ItemT = TypeVar("ItemT")

_MAX_SKIPPED_STEPS = 1_000_000
"""A run ends after too many skipped steps; a replay shows their numbers instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """The results of a step."""

    metrics: dict[str, float]
    """As `TrainBackend.finish_step` returns them."""
    weights_before: str
    """Digest."""
    weights_after: str
    """Digest."""
    random_state: str
    """Digest of torch's random state before the step."""
    environment: Environment


def start_of(run: RecordedRun, step: int, *, model_path: Path, scratch: Path) -> Checkpoint:
    """Return a checkpoint of the moment before `step`.

    If the run kept none, train forward from the nearest earlier checkpoint, or from the base model, through the
    recorded steps, each with its recorded settings.

    Args:
        run: The run.
        step: A recorded step of it.
        model_path: The model that the run began with, a folder or a model on the Hugging Face Hub; read only if no
            checkpoint precedes the step, or if checkpoints hold adapters alone.
        scratch: Folder for a checkpoint that the run did not keep.

    Raises:
        SetupError: a step on the way is not recorded, the weights to start from are not the recorded ones, or
            `scratch` has no room.
        ConfigError: the base model cannot be found or loaded.
    """
    run.recording(step)  # raises before anything is computed
    start = run.checkpoint_before(step)
    first = run.recording(1 if start is None else start.step + 1)
    trainer = _Trainer(start, first.settings, model_path)
    _require_same_weights(trainer, first, start, model_path)
    if start is not None and start.step == step - 1:
        return start
    store = CheckpointStore(scratch / "checkpoints", keep=1, room_remedy=TEMPORARY_ROOM)
    for number in range(first.inputs.step, step):
        recording = run.recording(number)
        if recording.settings != trainer.settings:
            trainer = _Trainer(trainer.save(store, number - 1), recording.settings, model_path)
        log.info("step.retrained", step=number, toward=step)
        trainer.compute(recording)
    return trainer.save(store, step - 1)


def replay_step(
    start: Checkpoint, recording: Recording, settings: StepSettings, *, model_path: Path | None = None
) -> ReplayedStep:
    """Compute a recorded step.

    Args:
        start: From `start_of`.
        recording: The step.
        settings: The recording's, or other ones to see their effect.
        model_path: The model that the run began with, which the adapters of a checkpoint belong to, as for
            `start_of`; None: where the settings say.

    Raises:
        SetupError: the groups do not fit the model, or the settings leave none of them.
    """
    return _Trainer(start, settings, model_path or settings.model.path).compute(recording)


def _model_folder(start: Checkpoint | None, settings: StepSettings, model_path: Path) -> Path:
    """Return the checkpoint's model, or the one that the run began with: adapters alone have no model of their own.

    Args:
        start: The checkpoint; None: none precedes the step.
        settings: Settings of the step.
        model_path: The model that the run began with.

    Raises:
        SetupError: there is none.
    """
    if start is not None and not settings.trainer.lora.rank:
        return start.model_path
    folder = hub.fetch(model_path)
    if not (folder / "config.json").is_file():
        why = "no checkpoint precedes the step" if start is None else "checkpoints of the run hold adapters alone"
        raise SetupError(
            f"{why}, and model.path = {str(model_path)!r} has no model; give the folder of the model that the run "
            "began with by --model.path=FOLDER"
        )
    return folder


def _with_reference(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings with a folder in place of a reference on the Hugging Face Hub."""
    kl = algorithm.kl
    if kl.reference is None:
        return algorithm
    kl = kl.model_copy(update={"reference": hub.fetch(kl.reference, setting="algorithm.kl.reference")})
    return algorithm.model_copy(update={"kl": kl})


class _Trainer:
    """Weights, optimizer and random state between two steps."""

    def __init__(self, start: Checkpoint | None, settings: StepSettings, model_path: Path) -> None:
        config = settings.trainer
        if not torch.cuda.is_available():
            # A step from a GPU can be examined without one; its environment differs visibly
            config = config.model_copy(update={"device": "cpu"})
        self.settings = settings
        self._base_path = _model_folder(start, settings, model_path)
        self.backend = InProcessBackend(
            self._base_path,
            config,
            _with_reference(settings.algorithm),
            seed=settings.run.seed,
            temperature=settings.sampling.temperature,
            demonstration_coef=settings.demonstration_coef,
            max_skipped_steps=_MAX_SKIPPED_STEPS,
        )
        self.backend.load(None if start is None else start.path)
        self._reader = open_reader(self._base_path)

    def compute(self, recording: Recording) -> ReplayedStep:
        inputs = recording.inputs
        screenings = [screen(group, self.settings.filters) for group in recording.groups]
        filtered = Counter(each.reason for each in screenings if each.reason is not None)
        try:
            groups = [
                None if screening.reason else self._reader.read(group, recording.images).screened(screening)
                for group, screening in zip(recording.groups, screenings, strict=True)
            ]
        except InvalidRequestError as error:
            raise SetupError(f"step {inputs.step} does not fit the model in {self._base_path}: {error}") from None
        if not any(groups):
            found = ", ".join(f"{reason} {count}" for reason, count in filtered.items())
            raise SetupError(f"the filters leave none of the {len(recording.groups)} groups of the step ({found})")
        demonstrations = self._demonstrations(recording)
        bound, version = self.settings.trainer.max_staleness, inputs.policy_version
        chunks = [
            [group for group in chunk if group and not is_too_old(group.oldest_version, version, max_staleness=bound)]
            for chunk in _cut(groups, inputs.chunks)
        ]
        fresh = [group for chunk in chunks for group in chunk]
        if not fresh:
            num_groups = sum(group is not None for group in groups)
            raise SetupError(f"trainer.max_staleness = {bound} leaves none of the {num_groups} groups of the step")
        with computing_threads(inputs.environment.num_threads):
            before = self.backend.digests()
            metrics = take_step(self.backend, filter(None, chunks), inputs.policy_version, demonstrations)
            environment = self.backend.environment()
        return ReplayedStep(
            metrics=metrics | _filter_metrics(recording, fresh, filtered),
            weights_before=before.weights,
            weights_after=self.backend.digests().weights,
            random_state=before.random_state,
            environment=environment,
        )

    def _demonstrations(self, recording: Recording) -> list[TrainSequence]:
        if not recording.demonstrations:
            return []
        reader = DemonstrationReader.open(self._base_path)
        try:
            return [reader.expand(each) for each in recording.demonstrations]
        except InvalidRequestError as error:
            raise SetupError(
                f"the demonstrations of step {recording.inputs.step} do not fit the model in {self._base_path}: {error}"
            ) from None

    def save(self, store: CheckpointStore, step: int) -> Checkpoint:
        return store.save(step, {}, self.backend.save)


def _cut(groups: Sequence[ItemT], sizes: Sequence[int]) -> list[Sequence[ItemT]]:
    """Cut into chunks of these sizes; none: into one."""
    bounds = [0, *accumulate(sizes or [len(groups)])]
    return [groups[start:stop] for start, stop in pairwise(bounds)]


def _filter_metrics(
    recording: Recording, trained: Sequence[TrainGroup], filtered: Mapping[FilterReason, int]
) -> dict[str, float]:
    """Return what the filters did to a step. A run trains no group that it filters, so only other settings find one."""
    num_played = {group.id.index: len(group.samples) for group in recording.groups}
    return {
        "num_masked_samples": float(sum(sum(group.masked) for group in trained)),
        "num_dropped_samples": float(sum(num_played[group.index] - len(group.samples) for group in trained)),
        **{f"num_groups_{reason}": float(count) for reason, count in filtered.items()},
    }


def _require_same_weights(trainer: _Trainer, first: Recording, start: Checkpoint | None, model_path: Path) -> None:
    found, recorded = trainer.backend.digests().weights, first.inputs.weights
    if found == recorded:
        return
    if start is None:
        raise SetupError(
            f"model.path = {str(model_path)!r} holds another model than the run began with: its weights have digest "
            f"{found}, step {first.inputs.step} was recorded with {recorded}; give the right one by --model.path=FOLDER"
        )
    raise SetupError(
        f"{start.path} is a checkpoint of another history than step {first.inputs.step}: its weights have digest "
        f"{found}, the step was recorded with {recorded}; replay a step that the run trained after its last resume"
    )
