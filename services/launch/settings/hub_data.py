"""The data sets on the Hugging Face Hub that a recipe names, without asking the Hub."""

from collections.abc import Iterator

from services.recipe import Recipe
from services.trainer.data.config import SourceConfig
from services.trainer.data.sources import hub
from services.trainer.data.sources.files import split_slice


def hub_sources(recipe: Recipe, *, with_sets: bool = True) -> Iterator[tuple[str, str]]:
    """Yield id and revision of each data set, for training and demonstrations, once each.

    Args:
        recipe: The recipe.
        with_sets: Whether to yield those of its evaluation sets too.
    """
    sources: list[SourceConfig] = [*recipe.data.by_name.values()]
    if with_sets:
        sources += recipe.evaluation.sets.values()
    if recipe.demonstrations is not None:
        sources += recipe.demonstrations.by_name.values()
    found = {(split_slice(path)[0], source.revision): None for source in sources for path in source.paths}
    return ((repo, revision) for repo, revision in found if hub.is_hub_id(repo))


def describe_uncached(recipe: Recipe, *, with_sets: bool) -> list[str]:
    """Return a line for each data set of which the cache has nothing; see `hub_sources`."""
    return [
        f"data set {repo} would be fetched from the Hugging Face Hub; no rows were checked"
        for repo, revision in hub_sources(recipe, with_sets=with_sets)
        if not hub.is_cached(repo, revision=revision)
    ]
