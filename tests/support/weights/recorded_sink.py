"""An engine that notes what a push does to it, for tests of the receiver."""

import asyncio
from collections.abc import Callable, Mapping

import torch

from penstock.errors import UnavailableError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest, specs_of
from services.rollout.engine.sglang_plugin.transports import Transport
from services.rollout.engine.sglang_plugin.variables import HeldParameter
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver

MANIFEST = Manifest.plan(specs_of({"a": torch.zeros(2), "b": torch.zeros(2)}), max_bucket_bytes=8)


DIGESTS = {"a": 7, "b": 7}
"""Of what a `RecordedSink` holds at first."""


class RecordedSink:
    """An engine that notes what is asked of it, and can be made to hang at one call, until `released`, or to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.transports: list[Transport] = []
        self.held = dict(DIGESTS)
        self.hang_at = ""
        self.hanging = asyncio.Event()
        self.released = asyncio.Event()
        self.fail_at = ""
        self.failures: list[str] = []

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise UnavailableError(f"{call} failed")
        if call == self.hang_at:
            self.hanging.set()
            await self.released.wait()

    async def join_group(self, source: rollout_pb2.BroadcastSource) -> None:
        await self._note(f"join {source.group_name}")

    async def leave_group(self, name: str) -> None:
        await self._note(f"leave {name}")

    async def pause(self, mode: rollout_pb2.PauseMode.ValueType, drain_s: float) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def begin(self) -> None:
        await self._note("begin")

    async def load(self, manifest: Manifest, transport: Transport, digest: str) -> None:
        self.transports.append(transport)
        for spec in manifest.tensors:
            await self._note(f"load {spec.name}")

    async def end(self) -> None:
        await self._note("end")

    async def end_if_open(self) -> None:
        await self._note("end_if_open")

    async def parameters(self) -> dict[str, HeldParameter]:
        await self._note("parameters")
        return {name: HeldParameter(dtype="float32", shape=(2,)) for name in "ab"}

    async def digests(self, kind: str) -> dict[str, int]:
        await self._note(f"digests {kind}")
        return self.held

    async def set_version(self, version: int) -> None:
        await self._note(f"version {version}")

    def fail_running(self, reason: str) -> None:
        self.failures.append(reason)


def group(name: str = "g1") -> rollout_pb2.BroadcastSource:
    """A group of a trainer and one engine."""
    return rollout_pb2.BroadcastSource(group_name=name, master_host="h", master_port=1, rank_offset=1, world_size=2)


async def receiver(
    sink: RecordedSink, *, num_ranks: int = 1, on_change: Callable[[], None] = lambda: None
) -> WeightReceiver:
    """A receiver that knows its engine's parameters; `close_receivers` ends it."""
    made = WeightReceiver(sink, prepare_deadline_s=1.0, max_deadline_s=60.0, num_ranks=num_ranks, on_change=on_change)
    _open_receivers.append(made)
    await made.open()
    sink.calls.clear()
    return made


_open_receivers: list[WeightReceiver] = []


async def close_receivers() -> None:
    """End all that a test has made."""
    while _open_receivers:
        await _open_receivers.pop().close()


async def push(
    receiver: WeightReceiver,
    push_id: str,
    version: int,
    *,
    group_name: str = "g1",
    deadline_s: float = 30.0,
    replaces_newer: bool = False,
    digests: Mapping[str, int] = DIGESTS,
) -> None:
    """A complete push of weights that have these digests."""
    source = group(group_name)
    await receiver.prepare(push_id, version, source, MANIFEST, deadline_s=deadline_s, replaces_newer=replaces_newer)
    await finish(receiver, push_id, digests)


async def finish(receiver: WeightReceiver, push_id: str, digests: Mapping[str, int] = DIGESTS) -> None:
    """All stages after `prepare`."""
    async for _ in receiver.update(push_id, rollout_pb2.PAUSE_MODE_RETRACT, 0.0, digests):
        pass
