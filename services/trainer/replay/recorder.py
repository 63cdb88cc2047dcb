"""Records the steps of a running trainer (`trainer.record_groups`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.records import Group
from services.trainer.backend.base import TrainBackend
from services.trainer.replay.recording import StepInputs, write_recording
from services.trainer.replay.run import GROUPS_FOLDER
from services.trainer.replay.settings import StepSettings


class StepRecorder:
    """Writes the inputs of each step of a run."""

    def __init__(self, run_folder: Path, settings: StepSettings, backend: TrainBackend, *, run_id: str) -> None:
        """Record below `run_folder` the steps that `backend` takes with `settings`."""
        self._folder = run_folder / GROUPS_FOLDER
        used = {"device": backend.config.device, "dtype": backend.config.dtype}  # not "auto"
        self._settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=used)})
        self._backend = backend
        self._run_id = run_id

    def record(self, step: int, policy_version: int, groups: Sequence[Group], images: Mapping[str, bytes]) -> None:
        """Write the recording of `step`. Blocks; call it right before the step.

        Args:
            step: Its number, from 1.
            policy_version: The published version, which the weights have.
            groups: The batch as it was played, in its order.
            images: The groups' images, by content hash.
        """
        digests = self._backend.digests()
        inputs = StepInputs(
            run_id=self._run_id,
            step=step,
            policy_version=policy_version,
            groups=tuple(group.id.index for group in groups),
            weights=digests.weights,
            random_state=digests.random_state,
            environment=self._backend.environment(),
        )
        write_recording(self._folder, inputs, self._settings, groups, images)
