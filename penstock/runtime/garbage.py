"""How often a process looks for garbage: objects that refer to each other in a circle; all others go without it.

Each time it looks, everything else in the process waits. CPython looks after 700 more objects were made than deleted,
and now and then at all objects there are. Calls in flight are many objects and seldom garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def exempt_present_objects() -> None:
    """Never look again at what has been made so far, such as modules and weights, without the garbage among it.

    It stays exempt for as long as the process lives, so do this in a process of its own.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Do that, and look a thirtieth as often during the context.

    Not in a process whose garbage may hold a GPU's memory, which would wait as long.
    """
    thresholds = gc.get_threshold()
    exempt_present_objects()
    gc.set_threshold(20_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
