"""Puts folders in place of the models on the Hugging Face Hub that a recipe names."""

from collections.abc import Callable
from pathlib import Path

from penstock.model import hub
from services.recipe import Recipe


def with_model(recipe: Recipe, find: Callable[..., Path] = hub.fetch, *, with_weights: bool = True) -> Recipe:
    """Return the recipe with a folder in place of a model on the Hugging Face Hub.

    Written to a file, the folder becomes the model's id and commit; see `penstock.config.ModelPath`.

    Args:
        recipe: The recipe.
        find: Returns the folder, as `hub.fetch` does.
        with_weights: Whether the weights are needed, too.

    Raises:
        ConfigError: there is no such model or revision.
        UnavailableError: the Hub cannot be reached, and its cache has no copy.
    """
    if recipe.model is None:
        return recipe
    path = find(recipe.model.path, setting="model.path", with_weights=with_weights)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})


def with_models(recipe: Recipe, find: Callable[..., Path] = hub.fetch) -> Recipe:
    """Do the same for the trained model and the reference of the KL penalty; see `with_model`."""
    recipe, kl = with_model(recipe, find), recipe.algorithm.kl
    if kl.reference is None:
        return recipe
    reference = find(kl.reference, setting="algorithm.kl.reference", with_weights=True)
    kl = kl.model_copy(update={"reference": reference})
    return recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"kl": kl})})


def with_cached_models(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Do the same without asking the Hub; also return a line for each model that the cache lacks."""
    missing = []

    def find(path: Path, *, setting: str, with_weights: bool) -> Path:
        folder = hub.find_cached(path)
        if folder is None:
            missing.append(f"{setting} {path} would be fetched from the Hugging Face Hub; it was not checked")
        return folder or path

    return with_models(recipe, find), missing
