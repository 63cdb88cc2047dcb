"""Settings of `penstock train`, section [launch] of a recipe."""

import pydantic

from penstock.config import Config


class LaunchConfig(Config):
    """How `penstock train` keeps the processes of a run going."""

    max_restarts: int = pydantic.Field(default=5, ge=0)
    """A process that dies more often than this within ten minutes ends the run."""
