"""Custom verifiers: the user's own Python functions. They are loaded in the forkserver, once, and called in workers.

A verifier is a function that takes (golds, response, prompt) and returns how right the response is: a bool, a number
from 0 to 1, or, to name the answer it found, a dict or object with `credit` and `extracted`:

    def verify(golds: list[str], response: str, prompt: str) -> float:
        return float(response.strip() in golds)

It runs one item at a time, under the item's deadline and the workers' limits. It can neither use the network nor start
processes nor write files. All workers share what its module imports when it is loaded. If it raises, or returns
anything else, the item's status is FAILED. Its worker goes on to other items, unless the verifier left threads behind:
then the worker is replaced, and they end with it. A verifier that runs code out of responses gives the worker to that
code, so set reward.recycle_after = 1: then no other item comes to that worker.
"""

import importlib
import importlib.util
import inspect
import numbers
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.verdict_status import Status
from services.reward.isolation.tasks import VerifierTask, WorkerReply, sendable
from services.reward.verdict import Method

_MAX_DETAIL_CHARS = 500
_MAX_EXTRACTED_CHARS = 512


class CustomVerifier(Protocol):
    """The interface of a custom verifier."""

    def __call__(self, golds: list[str], response: str, prompt: str, /) -> Any:
        """Return the credit, from 0 to 1, or a dict or object with `credit` and `extracted`."""


class VerifierLoadError(Exception):
    """A custom verifier cannot be loaded."""


class _BadReturnError(Exception):
    """A custom verifier returned something that is not a score."""


def load_verifier(name: str, spec: str) -> CustomVerifier:
    """Return the verifier that `spec`, "path/to/file.py:function" or "package.module:function", names.

    Raises:
        VerifierLoadError: names the verifier, its spec and the cause.
    """
    module_or_file, colon, function = spec.rpartition(":")
    try:
        if not colon or not module_or_file or not function:
            raise ValueError("it names no function; write path/to/file.py:function or package.module:function")
        module = (
            _load_file(name, Path(module_or_file))
            if module_or_file.endswith(".py")
            else importlib.import_module(module_or_file)
        )
        verifier: Any = module
        for part in function.split("."):
            verifier = getattr(verifier, part)
        if not callable(verifier):
            raise TypeError(f"{function} is a {type(verifier).__name__}, not a function")
        inspect.signature(verifier).bind([], "", "")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the user's module: loading it may raise anything
        cause = f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]
        raise VerifierLoadError(f"custom verifier {name} = {spec!r} cannot be loaded: {cause}") from None
    return verifier  # type: ignore[no-any-return]


def run_verifier(verifier: CustomVerifier, task: VerifierTask) -> WorkerReply:
    """Call `verifier` on the task; return a reply whatever it does, short of dying."""
    try:
        returned = verifier(list(task.golds), task.response, task.prompt)
        credit, extracted = _read(returned)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - it is the user's function: it may raise anything
        detail = str(error) if isinstance(error, _BadReturnError) else f"{type(error).__name__}: {error}"
        return WorkerReply(status=Status.FAILED, detail=sendable(detail[:_MAX_DETAIL_CHARS]))
    return WorkerReply(status=Status.OK, credit=credit, extracted=extracted, method=Method.VERIFIER)


def _read(returned: Any) -> tuple[float, str]:
    """Return the credit and the extracted answer."""
    extracted: Any = ""
    credit = returned
    if isinstance(returned, Mapping):
        credit, extracted = returned.get("credit"), returned.get("extracted", "")
    elif hasattr(returned, "credit"):
        credit, extracted = returned.credit, getattr(returned, "extracted", "")
    if getattr(credit, "shape", None) == () and hasattr(credit, "item"):  # a number or bool of numpy or torch
        credit = credit.item()
    if not (isinstance(credit, numbers.Real) and 0 <= float(credit) <= 1):  # NaN fails this comparison
        raise _BadReturnError(f"it returned {repr(returned)[:200]}; return a number from 0 to 1")
    if not isinstance(extracted, str):
        raise _BadReturnError(f"it returned extracted = {repr(extracted)[:200]}; return text")
    return float(credit), sendable(extracted[:_MAX_EXTRACTED_CHARS])


def _load_file(name: str, path: Path) -> Any:
    module_name = f"penstock_verifier_{name}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    found.loader.exec_module(module)
    return module
