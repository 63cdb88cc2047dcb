"""Loads user-written axes, named as `module:function` in the recipe."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig


def require_functions(config: AlgorithmConfig) -> None:
    """Import every function that the recipe names, so that a wrong name or option is found before the run starts.

    Raises:
        ConfigError: a module or function does not exist, or the function does not take its arguments and options.
    """
    if config.advantage.kind == "custom":
        _require(
            config.advantage.function,
            "algorithm.advantage",
            ("rewards_G", "group_G", "num_tokens_G"),
            config.advantage.options,
        )
    if config.trust_region.kind == "custom":
        _require(config.trust_region.function, "algorithm.trust_region", ("step",), config.trust_region.options)


def _require(name: str, section: str, arguments: tuple[str, ...], options: Mapping[str, Any]) -> None:
    function = load_function(name, f"{section}.function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C without a signature: the first step shows
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"{section}.function = {name!r} cannot be called with {', '.join(arguments)} and the options "
            f"{sorted(options)}: {error}; mend {section}.options or the function (examples/algorithm/own_axes.py)"
        ) from None


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
        raise ConfigError(
            f"{setting} = {name!r} is a {type(function).__name__}, not a function; name one as module:function"
        )
    return function  # type: ignore[no-any-return]  # it is callable, which is all that can be known
