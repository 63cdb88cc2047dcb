"""Keeps torch out of the worker's process.

transformers imports torch if it is installed. That costs seconds of start-up and half a gigabyte, for a tokenizer that
does not need it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Hide torch from transformers, which must be imported for the first time during the context.

    Does nothing if torch or transformers is imported already, for example by an environment. Afterwards torch can be
    imported as usual; only transformers runs without it.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python spells "cannot be imported"
    try:
        yield
    finally:
        del sys.modules["torch"]
