"""Has ranks of several machines meet in the same start, although each torchrun counts its own restarts.

Ranks join those of the same start. Until they have joined, they do not notice each other's end, so the ranks of one
machine may be at a later start than those of another. Ranks that are behind then end, and their torchrun starts them
again, until none is behind.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from services.trainer.backend.ranks.beats import BEAT_S
from services.trainer.backend.ranks.torchrun import leave


@contextmanager
def catching_up(store: dist.Store, *, rank: int, start: int) -> Iterator[None]:
    """End this process if ranks of another machine begin a later start within this context, in which it joins them.

    Args:
        store: torchrun's, which outlives its ranks.
        rank: This one.
        start: How often torchrun has restarted its ranks.
    """
    for number in range(start + 1):  # ranks of an earlier start may have ended before they came here
        store.set(_key(number), "")
    own = store.clone()  # the first connection is busy while this rank waits for others
    joined = threading.Event()
    threading.Thread(target=_watch, args=(own, rank, start, joined), name="watch of starts", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _watch(store: dist.Store, rank: int, start: int, joined: threading.Event) -> None:
    try:
        while not store.check([_key(start + 1)]):
            if joined.wait(BEAT_S):
                return
    except RuntimeError:  # the store is gone, and the thread that joins learns it as well
        return
    leave(rank, f"other ranks have begun start {start + 1}, and this one belongs to start {start}")


def _key(start: int) -> str:
    return f"begun {start}"
