"""Whether models of a type are trained. Pure, so that it is checked before anything heavy is loaded."""

from pathlib import Path

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import SFT_MODEL_TYPES, TRAINED_MODEL_TYPES
from penstock.model.folder import read_json


def trained_types(*, is_sft: bool) -> tuple[str, ...]:
    """Return the model types that are trained, in supervised training or with engines."""
    return SFT_MODEL_TYPES if is_sft else TRAINED_MODEL_TYPES


def require_trained_type(folder: Path, *, is_sft: bool) -> None:
    """Check the type of a model folder's model; a folder without one is for others to refuse.

    Args:
        folder: The folder.
        is_sft: Whether supervised training will run, which has no engines.

    Raises:
        ConfigError: models of this type are not trained, or config.json is not JSON.
    """
    model_type = read_json(folder / "config.json").get("model_type")
    types = trained_types(is_sft=is_sft)
    if model_type is None or model_type in types:
        return
    if model_type in SFT_MODEL_TYPES:
        raise ConfigError(
            f"model.path = {str(folder)!r}: models of type {model_type} can be trained by `penstock sft` alone, "
            f"because engines do not take their weights yet; choose one of type {', '.join(types)}"
        )
    raise ConfigError(
        f"model.path = {str(folder)!r}: models of type {model_type} cannot be trained; choose one of type "
        f"{', '.join(types)}"
    )
