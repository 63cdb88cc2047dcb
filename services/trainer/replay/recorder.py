"""Records the steps of a running trainer (`trainer.record_groups`)."""

from collections.abc import Sequence
from pathlib import Path

from penstock.records import Group
from services.trainer.backend.optimizer import PolicyOptimizer
from services.trainer.backend.random_state import random_state_digest
from services.trainer.replay.environment import current_environment
from services.trainer.replay.recording import StepInputs, write_recording
from services.trainer.replay.run import GROUPS_FOLDER
from services.trainer.replay.settings import StepSettings


class StepRecorder:
    """Writes the inputs of each step of a run."""

    def __init__(self, run_folder: Path, settings: StepSettings, optimizer: PolicyOptimizer, *, run_id: str) -> None:
        """Record below `run_folder` what `optimizer` is about to train with `settings`."""
        self._folder = run_folder / GROUPS_FOLDER
        used = {"device": optimizer.device.type, "dtype": str(optimizer.dtype).removeprefix("torch.")}  # not "auto"
        self._settings = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=used)})
        self._optimizer = optimizer
        self._run_id = run_id

    def record(self, step: int, policy_version: int, groups: Sequence[Group]) -> None:
        """Write the recording of `step`, which comes next. Blocks; call it before the step.

        Args:
            step: Its number, from 1.
            policy_version: The published version, which the weights have.
            groups: The batch as it was played, in its order.
        """
        inputs = StepInputs(
            run_id=self._run_id,
            step=step,
            policy_version=policy_version,
            groups=tuple(group.prompt.index for group in groups),
            weights=self._optimizer.weights_digest(),
            random_state=random_state_digest(),
            environment=current_environment(self._optimizer.device),
        )
        write_recording(self._folder, inputs, self._settings, groups)
