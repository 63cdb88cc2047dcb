"""Checks the inputs of a whole run before it starts, and pins what it takes from the Hugging Face Hub."""

from typing import Any

from services.launch.checks.known_names import require_names
from services.launch.checks.model_fit import require_fits_model
from services.launch.checks.training_inputs import require_schedule, require_trainable_without_model
from services.launch.settings.hub_models import with_models
from services.launch.settings.service_settings import for_engine, for_router, for_trainer, router_url
from services.recipe import Recipe
from services.rollout.engine.sglang import recipe_settings
from services.trainer.data.named_section import named_section
from services.trainer.data.sources.files import pin
from services.trainer.evaluation.set_files import pin_sets


def require_inputs_without_model(recipe: Recipe) -> None:
    """Check what of a whole run's inputs can be checked before its model is there.

    Raises:
        ConfigError: as by `require_trainable_without_model`, or agents have no API to call, SGLang lacks a setting
            named in rollout.sglang, or a profile or an environment is unknown.
    """
    require_trainable_without_model(recipe)
    _require_agents_api(recipe)
    recipe_settings.require_known(recipe.rollout.sglang)
    require_names(recipe, sets=recipe.evaluation.is_in_training)


def require_inputs(recipe: Recipe) -> None:
    """Check a whole run's inputs before it starts.

    Raises:
        ConfigError: as by `require_inputs_without_model`, or there is no model, or a setting does not fit it (see
            `for_trainer` and `require_fits_model`).
        UnavailableError: a model is on the Hub, which cannot be reached.
    """
    require_inputs_without_model(recipe)
    recipe = with_models(recipe)
    for_engine(recipe)
    require_fits_model(recipe, for_trainer(recipe).model.path)


def require_at_launcher(recipe: Recipe) -> None:
    """Check what the launcher of a run uses itself, if engines, workers and trainer may be on other hosts.

    Raises:
        ConfigError: the sampling cannot be trained on, the learning rate's schedule does not fit into the steps, a name
            is unknown, agents have no API to call, or the router needs a model that is not here.
        UnavailableError: a model is on the Hub, which cannot be reached.
    """
    recipe.sampling.require_trainable()
    require_schedule(recipe)
    _require_agents_api(recipe)
    require_names(recipe, sets=recipe.evaluation.is_in_training)
    for_router(recipe)


def pin_inputs(recipe: Recipe, *, with_sets: bool, with_demonstrations: bool = False) -> Recipe:
    """Return the recipe with the Hugging Face Hub commits of its data pinned.

    Args:
        recipe: The recipe.
        with_sets: Whether to pin its evaluation sets too.
        with_demonstrations: Whether to pin its demonstrations too.

    Raises:
        DataError: there is no such data set, revision, configuration or split.
        UnavailableError: the Hub cannot be reached, and its cache has no copy.
    """
    pinned: dict[str, Any] = {"data": pin(recipe.data)}
    if with_sets:
        pinned["evaluation"] = pin_sets(recipe.evaluation, recipe.data)
    if with_demonstrations and recipe.demonstrations is not None:
        with named_section("demonstrations"):
            pinned["demonstrations"] = pin(recipe.demonstrations)
    return recipe.model_copy(update=pinned)


def _require_agents_api(recipe: Recipe) -> None:
    if recipe.worker.agents:
        router_url(recipe)
