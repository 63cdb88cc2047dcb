"""Processes that are ranks of one group over gloo, and run what a test gives them."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from penstock.runtime.children.parent_death import die_with

_TIMEOUT_S = 240.0


class RankPool:
    """Ranks that wait for work. Use as a context."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(num_ranks)), strict=True)
        self._parent = context.Process(target=_fork_ranks, args=(theirs, f"{self._folder.name}/store"), daemon=True)
        self._parent.start()
        for pipe in theirs:
            pipe.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(ranks, *args)` returns on each rank.

        Raises:
            AssertionError: it raised on one of them, or a rank is gone.
        """
        work, answers = pickle.dumps((function, args)), []
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it is gone, as its answer shows
                pipe.send_bytes(work)
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_TIMEOUT_S), f"rank {rank} has not answered within {_TIMEOUT_S:g} s"
            try:
                value, problem = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} is gone; its own traceback is on stderr") from None
            assert not problem, f"rank {rank}:\n{problem}"
            answers.append(value)
        return answers

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._parent.join(10.0)
        if self._parent.is_alive():
            self._parent.kill()
            self._parent.join()
        self._folder.cleanup()


def _fork_ranks(pipes: Sequence[Connection], path: str) -> None:
    """Import for all ranks, and fork them: what they import takes longer than most tests."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    assert starter.pid is not None
    die_with(starter.pid)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    gc.disable()  # most of what it would search are modules
    import torch
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    import tests.support.trainer.ranks.ranked_groups  # noqa: F401

    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a forked rank could hang on what another one holds"
    parent = os.getpid()
    for rank, pipe in enumerate(pipes):
        if os.fork():
            continue
        die_with(parent)
        for other in pipes:
            if other is not pipe:
                other.close()
        try:
            _serve(pipe, rank, len(pipes), path)
        except BaseException:  # noqa: BLE001 - nothing above this frame is the rank's
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


def _serve(pipe: Connection, rank: int, size: int, path: str) -> None:
    import torch
    import torch.distributed as dist

    from services.trainer.backend.ranks.ranks import Ranks

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
