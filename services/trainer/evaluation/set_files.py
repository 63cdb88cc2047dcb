"""Checks and pins the files of evaluation sets without importing the packages that read them.

Every process reads its recipe through this module, even if it never reads images or data.
"""

from contextlib import AbstractContextManager

from services.trainer.data.config import DataConfig
from services.trainer.data.named_section import named_section
from services.trainer.data.sources.files import pin, require_files
from services.trainer.evaluation.config import EvaluationConfig


def require_sets(config: EvaluationConfig) -> None:
    """Check that the sets' files exist, without asking the Hub; cheap enough to run before anything else starts.

    Raises:
        ConfigError: a file does not exist, or is of another split.
        DataError: a saved data set has no such split, or cannot be read.
    """
    for name, each in config.sets.items():
        with named_set(name):
            require_files(each)


def pin_sets(config: EvaluationConfig, data: DataConfig) -> EvaluationConfig:
    """Return the settings with the commit of each data set on the Hugging Face Hub; see `files.pin`.

    Raises:
        DataError: a data set, revision, configuration or split does not exist.
        UnavailableError: the Hub cannot be reached, and its cache has no copy.
    """
    pinned = {}
    for name, each in config.sets.items():
        with named_set(name):
            pinned[name] = each.model_copy(update={"revision": pin(each.data(data)).revision})
    return config.model_copy(update={"sets": pinned})


def named_set(name: str) -> AbstractContextManager[None]:
    """Say in an error which set it is about."""
    return named_section(f"evaluation.sets.{name}")
