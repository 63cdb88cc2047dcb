"""Errors of data that are read by another section than `[data]`."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import ConfigError, DataError, SetupError, UnavailableError


@contextmanager
def named_section(key: str) -> Iterator[None]:
    """Say in an error which section of the recipe it is about."""
    try:
        yield
    except (ConfigError, DataError, SetupError, UnavailableError) as error:
        raise type(error)(f"{key}: {error}") from None
