"""The data sets on the Hugging Face Hub that a recipe names, without asking the Hub."""

from collections.abc import Iterator

from services.recipe import Recipe
from services.trainer.data.config import SourceConfig
from services.trainer.data.sources import hub
from services.trainer.data.sources.files import split_slice


def hub_sources(recipe: Recipe, *, with_sets: bool = True) -> Iterator[tuple[str, SourceConfig]]:
    """Yield the id of each data set, for training and demonstrations, and the settings that choose its files.

    Args:
        recipe: The recipe.
        with_sets: Whether to yield those of its evaluation sets too.
    """
    sources: list[SourceConfig] = [*recipe.data.by_name.values()]
    if with_sets:
        sources += recipe.evaluation.sets.values()
    if recipe.demonstrations is not None:
        sources += recipe.demonstrations.by_name.values()
    for source in sources:
        for path in source.paths:
            repo, _ = split_slice(path)
            if hub.is_hub_id(repo):
                yield repo, source


def describe_uncached(recipe: Recipe, *, with_sets: bool) -> list[str]:
    """Return a line for each data set of which the cache lacks files; see `hub_sources`."""
    missing = {
        repo: None
        for repo, source in hub_sources(recipe, with_sets=with_sets)
        if not hub.is_cached(repo, config=source.hub_config, split=source.split, revision=source.revision)
    }
    return [f"data set {repo} would be fetched from the Hugging Face Hub; no rows were checked" for repo in missing]
