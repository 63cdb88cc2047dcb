"""Checks that this account may read a recipe's data sets on the Hugging Face Hub from here."""

from penstock.errors import DataError, SetupError, UnavailableError
from services.doctor.finding import Finding, blamed, ok, warning
from services.launch.settings.hub_data import hub_sources
from services.recipe import Recipe
from services.trainer.data.sources import hub

TIMEOUT_S = 5.0


def check_hub(recipe: Recipe) -> Finding:
    """Ask the Hub for each data set; nothing is downloaded."""
    sources = {(repo, source.revision): source for repo, source in hub_sources(recipe)}
    for (repo, revision), source in sources.items():
        try:
            hub.look_up(repo, revision=revision, timeout_s=TIMEOUT_S)
        except ModuleNotFoundError as error:
            remedy = "pip install 'penstock[trainer]'"
            return warning("Hub", f"{repo} cannot be looked up: {error.name} is not installed", remedy)
        except DataError as error:
            return blamed("Hub", error)
        except (SetupError, UnavailableError) as error:
            found = blamed("Hub", error)
            if hub.is_cached(repo, config=source.hub_config, split=source.split, revision=revision):
                return warning("Hub", f"{found.seen}; the cache has its files", "set HF_HUB_OFFLINE=1")
            return found
    return ok("Hub", f"{', '.join(repo for repo, _ in sources)} can be read" if sources else "not needed")
