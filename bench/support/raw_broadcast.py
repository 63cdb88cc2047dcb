"""A raw torch.distributed broadcast, to compare pushes with: plain processes, preallocated memory, nothing else."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.ports import free_ports

AHEAD = 4
"""Broadcasts in flight at a time, as in a push."""


def _raw(rank: int, world_size: int, port: int, sizes: list[int], control: Connection, backend: str) -> None:
    torch.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = f"bench-raw-{rank}"  # otherwise NCCL takes processes that share a GPU for one
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", 0)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    buffers = [torch.full((size,), rank, dtype=torch.uint8, device=device) for size in sizes]
    while control.recv():
        dist.barrier()
        started = time.perf_counter()
        under_way: list[Any] = []
        for buffer in buffers:
            under_way.append(dist.broadcast(buffer, src=0, async_op=True))
            if len(under_way) > AHEAD:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        control.send(time.perf_counter() - started)
    dist.destroy_process_group()  # else NCCL's threads keep a process whose peer has left


@contextlib.contextmanager
def raw_group(num_receivers: int, sizes: list[int], backend: str = "gloo") -> Iterator[list[Connection]]:
    """Run plain processes that broadcast on command."""
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    pipes = [context.Pipe() for _ in range(1 + num_receivers)]
    processes = [
        context.Process(target=_raw, args=(rank, 1 + num_receivers, port, sizes, its, backend), daemon=True)
        for rank, (_, its) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        yield [mine for mine, _ in pipes]
    finally:
        for mine, _ in pipes:
            mine.send(False)
        for process in processes:
            process.join(20)
            process.kill()


def broadcast_raw(pipes: list[Connection]) -> float:
    """Return the seconds that one broadcast took, by the sender's clock."""
    for pipe in pipes:
        pipe.send(True)
    return max(pipe.recv() for pipe in pipes)
