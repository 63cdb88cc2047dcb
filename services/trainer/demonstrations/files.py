"""The files of demonstrations: checked without the packages that read them."""

from services.trainer.data.named_section import named_section
from services.trainer.data.sources.files import require_files
from services.trainer.demonstrations.config import DemonstrationsConfig


def require_demonstrations(config: DemonstrationsConfig) -> None:
    """Check that the files exist, as far as this machine knows; cheap enough to do before anything else starts.

    Raises:
        ConfigError: a file does not exist, or is of another split.
        DataError: a saved data set has no such split, or cannot be read.
    """
    with named_section("demonstrations"):
        for source in config.by_name.values():
            require_files(source)
