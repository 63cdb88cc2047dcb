"""Processes that are ranks of one group over gloo, and run what a test gives them."""

import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_TIMEOUT_S = 240.0


class RankPool:
    """Ranks that wait for work. Use as a context."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, f"{self._folder.name}/store"), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(ranks, *args)` returns on each rank.

        Raises:
            AssertionError: it raised on one of them, or a rank is gone.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_TIMEOUT_S), f"rank {rank} has not answered within {_TIMEOUT_S:g} s"
            value, problem = pickle.loads(pipe.recv_bytes())
            assert not problem, f"rank {rank}:\n{problem}"
            answers.append(value)
        return answers

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, path: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    gc.disable()  # most of what it would search are modules
    import torch
    import torch.distributed as dist

    from services.trainer.backend.ranks.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks.join(dist.FileStore(path, size), rank=rank, size=size, device=torch.device("cpu"))
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (function(ranks, *args), "")
        except Exception:  # noqa: BLE001 - the test is told
            answer = (None, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))  # the pipe's own pickles would share tensors' memory, by files
