"""Finds environments by the name that a prompt gives.

Names are looked up in the worker's own configuration, then in the entry points of group `penstock.environments`, then
among those that come with Penstock. A prompt can only name an environment; it cannot make a worker import code.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points

from penstock.environments import EnvironmentFactory
from penstock.errors import ConfigError, InvalidRequestError
from services.rollout.worker.environments.single_turn import SingleTurn

ENTRY_POINT_GROUP = "penstock.environments"


class EnvironmentRegistry:
    """Environment factories by name."""

    def __init__(self, configured: Mapping[str, str] | None = None) -> None:
        """Load the environments of `configured` (name to "module:Class") beside those that are installed.

        Raises:
            ConfigError: a path names nothing that can be imported.
        """
        self._factories: dict[str, EnvironmentFactory] = {"single_turn": SingleTurn}
        for point in entry_points(group=ENTRY_POINT_GROUP):
            self._factories[point.name] = _load(point.name, point.value)
        for name, path in (configured or {}).items():
            self._factories[name] = _load(name, path)

    def find(self, name: str) -> EnvironmentFactory:
        """The factory called `name`.

        Raises:
            InvalidRequestError: there is none.
        """
        factory = self._factories.get(name)
        if factory is None:
            known = ", ".join(sorted(self._factories))
            raise InvalidRequestError(
                f"environment {name!r} is unknown; known: {known}; add yours under [worker.environments] as "
                f'{name} = "package.module:Class"'
            )
        return factory


def _load(name: str, path: str) -> EnvironmentFactory:
    module_name, colon, attribute = path.partition(":")
    problem = ""
    try:
        factory: object = getattr(importlib.import_module(module_name), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        factory, problem = None, f" ({error})"
    if not callable(factory):
        raise ConfigError(
            f'environment {name} = "{path}" cannot be loaded{problem}; write "package.module:Class" of a class with '
            "reset, step and close"
        )
    return factory
