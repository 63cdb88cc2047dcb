"""Finds the code that an adapter wraps: in an installed module or in a file."""

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError


def load_module(env: str) -> ModuleType:
    """Return the module that `env` names: "package.module", or the path of a file that ends with ".py".

    A file is imported once; its folder is appended to `sys.path`, so that it finds its neighbours.

    Raises:
        ConfigError: there is no such module, or importing it fails.
    """
    file = Path(env).resolve()
    is_file = env.endswith(".py")
    if is_file and not file.is_file():
        raise ConfigError(f'env = "{env}": there is no file {file}; relative paths begin where the worker was started')
    try:
        return _import_file(file) if is_file else importlib.import_module(env)
    except (Exception, SystemExit) as error:
        remedy = ""
        if isinstance(error, ModuleNotFoundError):
            remedy = f"; install {error.name} where workers run, or put the folder that has it on PYTHONPATH"
        raise ConfigError(f'env = "{env}" cannot be imported: {type(error).__name__}: {error}{remedy}') from error


def load_member(env: str) -> Any:
    """Return the object that `env` names: "package.module:Class", or "folder/file.py:Class".

    Raises:
        ConfigError: there is no such object, or importing its module fails.
    """
    module_name, colon, attribute = env.rpartition(":")
    if not colon or not module_name:
        raise ConfigError(f'env = "{env}" names no class; write "package.module:Class" or "file.py:Class"')
    module = load_module(module_name)
    if not hasattr(module, attribute):
        raise ConfigError(f'env = "{env}": {module.__file__} has no {attribute!r}; name a class that it has')
    return getattr(module, attribute)


@functools.cache
def _import_file(full: Path) -> ModuleType:
    name = f"{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if str(full.parent) not in sys.path:
        sys.path.append(str(full.parent))
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
