"""The model that a path on the command line names."""

import json
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from services.cli.model_folder import find_model


def test_model_takes_models_checkpoints_and_runs(tmp_path: Path) -> None:
    """The newest checkpoint of a run; what holds no model is refused."""

    def save(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    model = save(tmp_path / "plain")
    for step in (1, 2):
        checkpoint = tmp_path / f"run/checkpoints/step-{step:06d}"
        newest = save(checkpoint / "model")
        (checkpoint / "state.json").write_text("{}")
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    assert find_model(model) == model
    assert find_model(newest.parent) == newest
    assert find_model(tmp_path / "run") == newest
    with pytest.raises(ConfigError, match="is neither a model folder"):
        find_model(tmp_path)
