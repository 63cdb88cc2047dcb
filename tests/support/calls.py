"""How much work a function does, counted instead of timed: the same number on every machine, however busy it is."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def num_calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions while `function` runs, after it ran once to fill caches.

    A C function counts once, however long it runs: also bound what it is given. No garbage of other tests is collected
    meanwhile, whose finalizers would count.
    """
    function()
    count = 0

    def count_call(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
