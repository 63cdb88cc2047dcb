"""Finds the model that a path on the command line names."""

from pathlib import Path

from penstock.errors import ConfigError
from services.trainer.checkpoint.store import CheckpointStore


def find_model(path: Path, *, step: int | None = None, name: str = "--model") -> Path:
    """Return the model in `path`: a model folder, a checkpoint, or a run's checkpoint, the newest or that of `step`.

    Args:
        path: The user's path.
        step: Step of the checkpoint, if the path is a run.
        name: Name of the option or argument, for errors.

    Raises:
        ConfigError: there is no model.
        SetupError: no checkpoint of the run is complete.
    """
    if step is not None:
        return _of_step(path, step, name)
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    if (path / "checkpoints").is_dir() and (newest := CheckpointStore(path / "checkpoints", keep=1).latest()):
        return newest.model_path
    raise ConfigError(
        f"{name} {path} is neither a model folder (config.json), nor a checkpoint (model/), nor a run (checkpoints/)"
    )


def _of_step(path: Path, step: int, name: str) -> Path:
    store = CheckpointStore(path / "checkpoints", keep=1)
    found = store.newest(before=step + 1)
    if found is None or found.step != step:
        steps = ", ".join(map(str, store.steps())) or "none"
        raise ConfigError(f"{name} {path} has no complete checkpoint of step {step}; there are checkpoints of: {steps}")
    return found.model_path
