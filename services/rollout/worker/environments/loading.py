"""Loads the class of an environment by its path, and checks it before an episode needs it."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import ConfigError

_METHODS = ("reset", "step", "close")


def load_class(path: str, args: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a factory of the class at `path`, "package.module:Class", with `args`.

    Raises:
        ConfigError: there is no such class, it is not an environment, or it does not take the arguments. The message
            does not name the environment: the caller knows its name.
    """
    module_name, colon, attribute = path.partition(":")
    problem = ""
    try:
        kind: Any = getattr(importlib.import_module(module_name), attribute) if colon else None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a boundary: importing a module runs a person's code
        kind, problem = None, f" ({type(error).__name__}: {error})"
    missing = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    if not callable(kind) or missing:
        if kind is not None and missing:
            problem = f" (it has no {', '.join(missing)})"
        raise ConfigError(
            f'"{path}" cannot be loaded{problem}; write "package.module:Class" of a class with reset, step and close'
        )
    return _with_args(kind, args)


def _with_args(kind: Callable[..., Any], args: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        inspect.signature(kind).bind(**args)
    except TypeError as error:
        shown = ", ".join(f"{name} = {value!r}" for name, value in args.items())
        raise ConfigError(f"args = {{{shown}}} do not fit {kind.__name__}: {error}") from None
    is_async = [name for name in _METHODS if inspect.iscoroutinefunction(getattr(kind, name))]
    if is_async and len(is_async) < len(_METHODS):
        plain = [name for name in _METHODS if name not in is_async]
        raise ConfigError(
            f"{kind.__name__} has async {' and '.join(is_async)} and plain {' and '.join(plain)}; make all "
            "three async, or none"
        )
    return functools.partial(kind, **args) if args else kind


def prepare(factory: Callable[[], Any]) -> None:
    """Run the one-time preparation of a class loaded by `load_class`: its class method `prepare`, if it has one, with
    the same arguments.

    Raises:
        ConfigError: it raised an error.
    """
    kind, args = (factory.func, factory.keywords) if isinstance(factory, functools.partial) else (factory, {})
    method = getattr(kind, "prepare", None)
    if not callable(method):
        return
    try:
        method(**args)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        name = getattr(kind, "__name__", repr(kind))
        raise ConfigError(f"{name}.prepare raised {type(error).__name__}: {error}") from error


def is_blocking(factory: Callable[[], Any]) -> bool:
    """Return whether the loaded class has plain functions, which would block an event loop."""
    kind = factory.func if isinstance(factory, functools.partial) else factory
    return not inspect.iscoroutinefunction(getattr(kind, "step", None))
