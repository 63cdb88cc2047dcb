"""Finds the model that a path on the command line names."""

from pathlib import Path

from penstock.errors import ConfigError
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore


def find_model(path: Path, *, step: int | None = None, name: str = "--model") -> Path:
    """Return the model in `path`: a model folder, a checkpoint, or a run's checkpoint, the newest or that of `step`.

    Args:
        path: The user's path.
        step: Step of the checkpoint, if the path is a run.
        name: Name of the option or argument, for errors.

    Raises:
        ConfigError: there is no model, or only its adapters.
        SetupError: no checkpoint of the run is complete.
    """
    found = find_model_or_adapter(path, step=step, name=name)
    if is_adapter_folder(found):
        raise ConfigError(
            f"{name} {path} holds adapters alone (trainer.lora); write the whole model with "
            f"`penstock export {path} FOLDER`, and name that folder"
        )
    return found


def is_adapter_folder(path: Path) -> bool:
    """Return whether the folder holds adapters, as the PEFT library writes them."""
    return (path / "adapter_config.json").is_file()


def find_model_or_adapter(path: Path, *, step: int | None = None, name: str = "--model") -> Path:
    """Do as `find_model`, but return the adapters of a run that trains adapters alone."""
    if step is not None:
        return _of_step(path, step, name)
    for folder in (path, path / "model", path / "adapter"):
        if (folder / "config.json").is_file() or is_adapter_folder(folder):
            return folder
    if (path / "checkpoints").is_dir() and (newest := CheckpointStore(path / "checkpoints", keep=1).latest()):
        return _in_checkpoint(newest)
    raise ConfigError(
        f"{name} {path} is neither a model folder (config.json), nor a checkpoint (model/), nor a run (checkpoints/)"
    )


def _of_step(path: Path, step: int, name: str) -> Path:
    store = CheckpointStore(path / "checkpoints", keep=1)
    found = store.newest(before=step + 1)
    if found is None or found.step != step:
        steps = ", ".join(map(str, store.steps())) or "none"
        raise ConfigError(f"{name} {path} has no complete checkpoint of step {step}; there are checkpoints of: {steps}")
    return _in_checkpoint(found)


def _in_checkpoint(checkpoint: Checkpoint) -> Path:
    adapter = checkpoint.path / "adapter"
    return adapter if is_adapter_folder(adapter) else checkpoint.model_path
