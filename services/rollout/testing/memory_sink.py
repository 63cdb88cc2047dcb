"""The core of a simulated engine: tensors in memory instead of a model, with injected faults."""

import asyncio
import datetime
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.errors import NotReadyError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.weights import nccl
from penstock.weights.adapters import adapted_weights
from penstock.weights.digest import tensor_digests
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang_plugin.merged_adapters import MergedAdapters
from services.rollout.engine.sglang_plugin.shards import Shard
from services.rollout.engine.sglang_plugin.transports import BroadcastTransport, DeltaTransport, Transport
from services.rollout.engine.sglang_plugin.variables import HeldParameter
from services.rollout.engine.sglang_plugin.weight_loader import take_into

Action = Literal["refuse", "die", "hang", "hold", "corrupt"]
"""refuse: answer with an error. die: kill -9. hang: never answer. hold: continue when faults are set again. corrupt:
change one value, and continue."""

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at one point, and how often it strikes."""

    action: Action
    times: int = 1


@dataclass(slots=True)
class Faults:
    """Faults still to strike, by the name of the point."""

    left: dict[str, Fault] = field(default_factory=dict)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)

    def replace(self, left: dict[str, Fault]) -> None:
        """Replace the faults, and release what the old ones hold."""
        self.left = left
        self.replaced.set()
        self.replaced = asyncio.Event()

    def take(self, point: str) -> Action | None:
        """Return the point's action, and count it; None if there is none."""
        fault = self.left.get(point)
        if fault is None or fault.times < 1:
            return None
        self.left[point] = Fault(fault.action, fault.times - 1)
        return fault.action

    async def strike(self, point: str, corrupt: Callable[[], None] = lambda: None) -> None:
        """Carry out the fault at `point`, if any."""
        action = self.take(point)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "refuse":
            raise NotReadyError(f"told to refuse at {point}")
        elif action == "hang":
            await asyncio.Event().wait()
        elif action == "hold":
            await self.replaced.wait()
        elif action == "corrupt":
            corrupt()


class MemorySink:
    """Implements `weight_sink.WeightSink` with tensors in memory, loaded by one thread, as SGLang loads them."""

    def __init__(self, shapes: Shapes, faults: Faults, *, group_timeout_s: float, audits: bool) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        self.groups: list[str] = []
        self.loads: list[str] = []
        self.num_paused = 0
        self.serving_digests: list[dict[str, int]] = []
        self._faults = faults
        self._timeout = datetime.timedelta(seconds=group_timeout_s)
        self._audits = audits
        self._thread = ThreadPoolExecutor(1)
        self._group: Any = None
        self._adapters: MergedAdapters | None = None
        self._targets: dict[str, Shard] = self._shards()

    async def join_group(self, source: rollout_pb2.BroadcastSource) -> None:
        self.groups.append(source.group_name)
        await self._faults.strike("join")
        await self._run(lambda: self._join(source))

    def _join(self, source: rollout_pb2.BroadcastSource) -> None:
        self._group = joined_group(source, timeout=self._timeout)

    async def leave_group(self, name: str) -> None:
        await self._run(self._leave)

    def _leave(self) -> None:
        if self._group is not None:
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self._group)
            self._group = None

    async def pause(self, mode: rollout_pb2.PauseMode.ValueType, drain_s: float) -> None:
        self.num_paused += 1

    async def resume(self) -> None:
        self.serving_digests.append(tensor_digests(self.tensors.items()) if self._audits else {})

    async def begin(self) -> None: ...
    async def end(self) -> None: ...
    async def end_if_open(self) -> None: ...
    async def set_version(self, version: int) -> None: ...
    def fail_running(self, reason: str) -> None: ...

    async def load(self, manifest: Manifest, transport: Transport, digest: str) -> None:
        self.loads.append(
            "whole" if isinstance(transport, DeltaTransport) and not transport.base_version else transport.name
        )
        # Load in two parts if possible, so that something can happen between them.
        cut = 1 if isinstance(transport, BroadcastTransport) else len(manifest.buckets)
        if adapted_weights(manifest):
            self._adapters = self._adapters or MergedAdapters(
                self._shards, lambda kind: tensor_digests(self.tensors.items(), kind)
            )
            self._targets = self._adapters.make_room(manifest, digest)
        else:
            self._adapters, self._targets = None, self._shards()
        for buckets in (manifest.buckets[:cut], manifest.buckets[cut:]):
            if buckets:
                await self._run(lambda: self._load(Manifest(buckets), transport))  # noqa: B023
                await self._faults.strike("bucket", self.corrupt)
        if self._adapters is not None:
            self._adapters.merge()

    def _load(self, manifest: Manifest, transport: Transport) -> None:
        take_into(self._targets, manifest, transport, dict.fromkeys(self.groups, self._group))

    def _shards(self) -> dict[str, Shard]:
        return {name: Shard(tensor=tensor) for name, tensor in self.tensors.items()}

    def corrupt(self) -> None:
        """Change the last bit of one value: of an adapter, if the push carries any."""
        if self._adapters is None:
            self.tensors["norm.weight"].view(torch.int16)[3] ^= 1
        else:
            next(iter(self._targets.values())).tensor.view(torch.int32)[0, 0] ^= 1

    async def parameters(self) -> dict[str, HeldParameter]:
        return {
            name: HeldParameter(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    async def digests(self, kind: str) -> dict[str, int]:
        loop = asyncio.get_running_loop()
        if self._adapters is not None:
            return await loop.run_in_executor(self._thread, self._adapters.digests, kind)
        return await loop.run_in_executor(self._thread, tensor_digests, self.tensors.items(), kind)

    async def _run(self, work: Callable[[], None]) -> None:
        if message := await asyncio.get_running_loop().run_in_executor(self._thread, _message_of, work):
            raise UnavailableError(f"simulated SGLang: {message}")


def joined_group(source: rollout_pb2.BroadcastSource, *, timeout: datetime.timedelta) -> Any:
    """Join the process group of a push, like SGLang's `init_custom_process_group`."""
    address = f"tcp://{source.master_host}:{source.master_port}"
    store, rank, world_size = next(dist.rendezvous(address, source.rank_offset, source.world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend(source.backend), dist.PrefixStore(source.group_name, store),
        group_name=source.group_name, backend_options=nccl.group_options(source.backend, timeout), timeout=timeout,
    )  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _message_of(work: Callable[[], None]) -> str:
    """Run the work and return its error as text, as SGLang does, so that no traceback keeps a group alive."""
    try:
        work()
    except (RuntimeError, ValueError, OSError, NotReadyError) as error:
        return str(error).splitlines()[0]
    return ""
