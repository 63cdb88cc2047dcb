"""Imports of much code, without collecting garbage among it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_ever() -> Iterator[None]:
    """Do not look for garbage among what is made in this context, now or later: modules and classes never are any.

    Importing torch or SGLang makes about a million objects; to search among them again and again takes a fifth of the
    time that their import takes. Whatever else the process has by then is not searched later either, so use it early
    in a process of its own. Where nothing is collected anyway, this changes nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
