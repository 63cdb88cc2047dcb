"""Keeps torch out of the worker's process.

transformers imports torch wherever it is installed: seconds of start-up and half a gigabyte, for a tokenizer that uses
nothing of it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Let transformers find no torch when it is first imported during the context; for a process of one's own.

    Nothing happens where torch or transformers is there already, for example because an environment uses it. Afterwards
    torch can be imported as ever; only transformers goes on without it.
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
