"""Records the steps of a running trainer (`trainer.record_groups`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.records import Group
from services.trainer.backend.base import TrainBackend
from services.trainer.replay.recording import (
    StepInputs,
    extend_recording,
    extend_recording_by_demonstrations,
    remove_recording,
    write_recording,
)
from services.trainer.replay.run import GROUPS_FOLDER
from services.trainer.replay.settings import StepSettings
from services.trainer.sft.sequences import RenderedDemonstration


class StepRecorder:
    """Writes the inputs of each step of a run, chunk by chunk. Its methods block."""

    def __init__(self, run_folder: Path, settings: StepSettings, backend: TrainBackend, *, run_id: str) -> None:
        """Record below `run_folder` the steps that `backend` takes with `settings`."""
        self._folder = run_folder / GROUPS_FOLDER
        used = {"device": backend.config.device, "dtype": backend.config.dtype}  # not "auto"
        self._settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=used)})
        self._backend = backend
        self._run_id = run_id
        self._inputs: StepInputs | None = None  # of the step under way

    def begin(self, step: int, policy_version: int) -> None:
        """Begin to record a step, right before its first chunk.

        Args:
            step: Its number, from 1.
            policy_version: The published version, which the weights have.
        """
        digests = self._backend.digests()
        self._inputs = StepInputs(
            run_id=self._run_id,
            step=step,
            policy_version=policy_version,
            groups=(),
            weights=digests.weights,
            random_state=digests.random_state,
            environment=self._backend.environment(),
        )

    def add(self, groups: Sequence[Group], images: Mapping[str, bytes]) -> None:
        """Record a chunk of the step, before it is computed.

        Args:
            groups: The chunk as it was played, in its order.
            images: The groups' images, by content hash.
        """
        assert self._inputs is not None, "begin comes first"
        is_first = not self._inputs.chunks
        self._inputs = msgspec.structs.replace(
            self._inputs,
            groups=(*self._inputs.groups, *(group.id.index for group in groups)),
            chunks=(*self._inputs.chunks, len(groups)),
        )
        if is_first:
            write_recording(self._folder, self._inputs, self._settings, groups, images)
        else:
            extend_recording(self._folder, self._inputs, groups, images)

    def add_demonstrations(self, demonstrations: Sequence[RenderedDemonstration]) -> None:
        """Record what the step learns beside its groups, before it is computed."""
        assert self._inputs is not None, "begin comes first"
        self._inputs = msgspec.structs.replace(self._inputs, num_demonstrations=len(demonstrations))
        extend_recording_by_demonstrations(self._folder, self._inputs, demonstrations)

    def keep(self) -> None:
        """Keep the recording of a step that failed, so that it can be replayed; `abort` does not remove it."""
        self._inputs = None

    def abort(self) -> None:
        """Remove the recording of a step that is not taken, unless it is kept."""
        if self._inputs is not None and self._inputs.chunks:
            remove_recording(self._folder, self._inputs.step)
