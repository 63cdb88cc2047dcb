"""Loads user-written axes, named as `module:function` in the recipe."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig


def require_functions(config: AlgorithmConfig) -> None:
    """Import every function that the recipe names, so that a wrong name is found before the run starts.

    Raises:
        ConfigError: a module or function does not exist.
    """
    if config.advantage.kind == "custom":
        load_function(config.advantage.function, "algorithm.advantage.function")
    if config.trust_region.kind == "custom":
        load_function(config.trust_region.function, "algorithm.trust_region.function")


@cache
def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: `module:function`; the module must be importable from where the trainer starts.
        setting: Setting that names it, for error messages.

    Raises:
        ConfigError: the module or function does not exist, or the name is not a function's.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting} = {name!r} cannot be imported: {error}; check PYTHONPATH and the name") from None
    if not callable(function):
        raise ConfigError(f"{setting} = {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # it is callable, which is all that can be known
