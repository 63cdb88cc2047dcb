"""What the environments that come with Penstock and take arguments have in common."""

from typing import Any

from penstock.errors import ConfigError


class BuiltIn:
    """Refuses wrong arguments when a worker starts; an error in each episode would fail every group."""

    @classmethod
    def prepare(cls, **args: Any) -> None:
        """Make an environment with these arguments, and drop it.

        Raises:
            ConfigError: an argument is out of range.
        """
        try:
            cls(**args)
        except ValueError as error:
            raise ConfigError(str(error)) from None
