"""Compares the variables that data set for the model's chat template with those that it reads."""

from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.chat.template_variables import require_free
from penstock.runtime.imports import import_with_extra
from services.recipe import Recipe
from services.trainer.data.config import DataConfig


def require_template_variables(
    recipe: Recipe, model: Path | None, *, with_sets: bool, with_demonstrations: bool = False
) -> None:
    """Check that a model's chat template reads the variables that the recipe's data set.

    Args:
        recipe: The recipe whose `chat_template_kwargs` are checked.
        model: Folder of the model; None: its template is unknown, and only reserved names are rejected.
        with_sets: Whether evaluation sets are played.
        with_demonstrations: Whether steps learn demonstrations beside groups.

    Raises:
        ConfigError: the template does not read one, or the name is reserved.
        SetupError: transformers is not installed.
    """
    sets = recipe.evaluation.sets if with_sets else {}
    learned = recipe.demonstrations if with_demonstrations else None
    given = {  # [data] comes first, because the others inherit it
        **_template_variables("data", recipe.data),
        **{f"evaluation.sets.{name}": each.chat_template_kwargs for name, each in sets.items()},
        **({} if learned is None else _template_variables("demonstrations", learned)),
    }
    if not any(given.values()):
        return
    import_with_extra("transformers", "data.chat_template_kwargs", extra="trainer")
    from penstock.model.chat.chat_template import Renderer

    require = require_free if model is None else Renderer.load(model).require_variables
    for section, names in given.items():
        try:
            require(names)
        except InvalidRequestError as error:
            raise ConfigError(f"{section}.{error}") from None


def _template_variables(section: str, data: DataConfig) -> dict[str, Mapping[str, object]]:
    """What a section and its sources set, by their names."""
    return {
        section: data.chat_template_kwargs,
        **{f"{section}.sources.{name}": source.chat_template_kwargs for name, source in data.sources.items()},
    }
