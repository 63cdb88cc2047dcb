"""Whether a model is trained. Pure, so that it is checked before anything heavy is loaded."""

from pathlib import Path

from penstock.errors import ConfigError
from penstock.model.families.linear_attention import attends_linearly, require_known_gates
from penstock.model.families.qwen_vl import TRAINED_MODEL_TYPES
from penstock.model.folder import read_json


def require_trained_type(folder: Path) -> None:
    """Check a model folder's model; a folder without one is for others to refuse.

    Raises:
        ConfigError: models of its type are not trained, its gates are not those that the trainer computes, or
            config.json is not JSON.
    """
    model = read_json(folder / "config.json")
    model_type = model.get("model_type")
    if model_type is None:
        return
    if model_type not in TRAINED_MODEL_TYPES:
        raise ConfigError(
            f"model.path = {str(folder)!r}: models of type {model_type} cannot be trained; choose one of type "
            f"{', '.join(TRAINED_MODEL_TYPES)}"
        )
    if attends_linearly(model_type):
        require_known_gates(model)
