"""A rollout engine without SGLang, for tests of pushes: a process with a real lease, receiver and process group.

All code is the engine's own except for the core: tensors in memory stand for the model, and one thread loads them, as
SGLang does in its one scheduler. It can be told to fail at any point of a push.
"""

import asyncio
import multiprocessing
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.bus.buckets import leases
from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig, LogConfig
from penstock.rpc.server import RpcServer, service_name
from penstock.telemetry import log
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from penstock.weights import shared_memory
from penstock.weights.digest import tensor_digests
from services.rollout.engine.rollout_service import RolloutServicer
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver
from services.rollout.testing.memory_sink import Fault, Faults, MemorySink, Shapes

_STAGES = ("prepare", "upload", "pause", "receive", "verify", "commit")
"""Stages of a push at whose beginning a fault can strike. Other points are "join", before joining the group, "bucket",
after loading the first bucket, and the calls "GetReplica" and "AbortWeights"."""

SHAPES: Shapes = {
    "embed.weight": (torch.float32, (64, 32)),
    "norm.weight": (torch.bfloat16, (7,)),
    "head.weight": (torch.bfloat16, (128, 33)),
    "scale": (torch.float32, (1,)),
}
"""The model of all simulated replicas."""


@dataclass(slots=True, kw_only=True)
class Report:
    """A replica's report about itself."""

    state: int
    version: int
    digests: dict[str, int]
    calls: list[str]
    """The points reached so far, without "join" and "bucket"."""
    groups: list[str]
    """Groups joined so far."""
    num_paused: int
    num_resumed: int
    loads: list[str]
    """The transport of each push that was received; "whole" for a delta with all weights."""
    serving_digests: list[dict[str, int]]
    """Its digests each time it began to serve again."""


@dataclass(slots=True, kw_only=True)
class _Options:
    """Arguments of the process."""

    url: str
    run: str
    lease_ttl_s: float
    replica_id: str
    state: common_pb2.ReplicaState.ValueType
    faults: dict[str, Fault]
    group_timeout_s: float
    reported_id: str
    port: int
    shapes: Shapes
    audits: bool
    elsewhere: bool


class _View:
    """Implements the servicer's part of `ReplicaView`."""

    def __init__(self, options: _Options, receiver: WeightReceiver) -> None:
        self.address = ""
        self.state_override = options.state
        self._options = options
        self._receiver = receiver

    @property
    def replica_id(self) -> str:
        return self._options.reported_id or self._options.replica_id

    async def refresh(self) -> None: ...

    def describe(self, replica_id: str = "") -> common_pb2.Replica:
        return common_pb2.Replica(
            replica_id=replica_id or self.replica_id,
            address=self.address,
            role=common_pb2.REPLICA_ROLE_UNIFIED,
            state=self.state_override or self._receiver.state,
            policy_version=self._receiver.version,
        )

    def lease(self) -> bytes:
        return write_replica(self.describe(self._options.replica_id))


class _Struck:
    """Where faults strike a replica."""

    def __init__(self, faults: Faults, sink: MemorySink) -> None:
        self.calls: list[str] = []
        self._faults = faults
        self._sink = sink

    async def strike(self, point: str) -> None:
        self.calls.append(point)
        await self._faults.strike(point, self._sink.corrupt)


class _FaultyReceiver(WeightReceiver):
    """The engine's receiver, with a fault before each stage."""

    struck: _Struck


def _faulty(name: str) -> Any:
    async def method(self: Any, *arguments: Any, **settings: Any) -> Any:
        await self.struck.strike(name)
        return await getattr(WeightReceiver, name)(self, *arguments, **settings)

    return method


for _name in _STAGES:
    setattr(_FaultyReceiver, _name, _faulty(_name))


class _FaultyServicer(RolloutServicer):
    """The engine's servicer, with a fault before the calls that are no stage."""

    struck: _Struck

    async def GetReplica(self, request: Any, context: Any) -> rollout_pb2.GetReplicaResponse:  # noqa: N802 - gRPC's
        await self.struck.strike("GetReplica")
        return await super().GetReplica(request, context)

    async def AbortWeights(self, request: Any, context: Any) -> rollout_pb2.AbortWeightsResponse:  # noqa: N802 - gRPC's
        await self.struck.strike("AbortWeights")
        return await super().AbortWeights(request, context)


async def _main(options: _Options, control: Connection) -> None:
    log.configure(LogConfig(level="error"), service=options.replica_id)
    faults = Faults(dict(options.faults))
    sink = MemorySink(options.shapes, faults, group_timeout_s=options.group_timeout_s, audits=options.audits)
    changed = asyncio.Event()
    receiver = _FaultyReceiver(
        sink, prepare_deadline_s=options.group_timeout_s, max_deadline_s=600.0, on_change=changed.set
    )
    await receiver.open()
    view = _View(options, receiver)
    servicer = _FaultyServicer(receiver, view, None)  # type: ignore[arg-type]  # it has no calls to drain
    struck = receiver.struck = servicer.struck = _Struck(faults, sink)
    server = RpcServer(host="127.0.0.1", port=options.port)
    server.add(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        servicer,
        service_name(rollout_pb2.DESCRIPTOR, "RolloutService"),
    )
    await server.start()
    view.address = server.address

    def answer() -> None:
        try:
            command, value = control.recv()
        except EOFError:
            os._exit(0)  # the test is gone
        if command == "faults":
            faults.replace(dict(value))
        elif command == "state":
            view.state_override = value
            changed.set()
        control.send(
            Report(
                state=receiver.state,
                version=receiver.version,
                digests=tensor_digests(sink.tensors.items()),
                calls=list(struck.calls),
                groups=list(sink.groups),
                loads=list(sink.loads),
                num_paused=sink.num_paused,
                num_resumed=len(sink.serving_digests),
                serving_digests=list(sink.serving_digests),
            )
        )

    asyncio.get_running_loop().add_reader(control.fileno(), answer)
    async with connect(BusConfig(url=options.url, lease_ttl_s=options.lease_ttl_s), run=options.run) as bus:
        bucket = await bus.bucket("replicas", ttl_s=options.lease_ttl_s)
        async with leases.held(bucket, options.replica_id, view.lease, ttl_s=options.lease_ttl_s) as lease:
            await lease.renew()
            control.send(server.address)
            await lease.renew_on_change(changed, is_passing=lambda: receiver.state == common_pb2.REPLICA_STATE_UPDATING)


def _process(options: _Options, control: Connection) -> None:
    torch.set_num_threads(1)
    if options.elsewhere:
        shared_memory.machine = lambda: "another"
    asyncio.run(_main(options, control))


class SimulatedReplica:
    """The test's handle on a replica."""

    def __init__(self, replica_id: str, process: Any, control: Connection) -> None:
        self.replica_id = replica_id
        self.process = process
        self.address = ""
        self._control = control

    async def report(self) -> Report:
        """Return the replica's report at this moment."""
        report: Report = await self._ask("report", None)
        return report

    async def set_faults(self, **faults: Fault) -> None:
        """Replace all faults by these."""
        await self._ask("faults", faults)

    async def set_state(self, state: int) -> None:
        """Claim to be in `state` (0: the true one)."""
        await self._ask("state", state)

    def kill(self) -> None:
        """Kill the process with -9."""
        self.process.kill()
        self.process.join(10)

    async def _ask(self, command: str, value: object) -> Any:
        self._control.send((command, value))
        return await asyncio.to_thread(self.receive)

    def receive(self, timeout_s: float = 60.0) -> Any:
        """Return the next message of the process. Blocking."""
        if not self._control.poll(timeout_s):
            raise TimeoutError(f"simulated replica {self.replica_id} says nothing")
        return self._control.recv()


def start_forkserver() -> None:
    """Start the process that replicas are forked from, which imports torch once for all. It runs until the end."""
    forkserver.set_forkserver_preload([__name__])
    forkserver.ensure_running()


@asynccontextmanager
async def simulated_replica(
    bus: Bus,
    *,
    replica_id: str = "",
    state: common_pb2.ReplicaState.ValueType = common_pb2.REPLICA_STATE_UNSPECIFIED,
    group_timeout_s: float = 20.0,
    reported_id: str = "",
    port: int = 0,
    shapes: Shapes = SHAPES,
    audits: bool = True,
    elsewhere: bool = False,
    **faults: Fault,
) -> AsyncIterator[SimulatedReplica]:
    """Run a replica during the context; it claims to be in `state` and to have the id `reported_id`.

    With `audits` it records its digests whenever it begins to serve, which reads every byte; with `elsewhere` it
    believes that it is on another machine than the trainer.
    """
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe()
    options = _Options(
        url=bus.config.url, run=bus.prompts.name.removesuffix("_PROMPTS"), lease_ttl_s=bus.config.lease_ttl_s,
        replica_id=replica_id or f"engine-{uuid.uuid4().hex[:8]}", state=state, faults=dict(faults),
        group_timeout_s=group_timeout_s, reported_id=reported_id, port=port, shapes=shapes, audits=audits,
        elsewhere=elsewhere,
    )  # fmt: skip
    process = context.Process(target=_process, args=(options, its), daemon=True)
    process.start()
    its.close()
    replica = SimulatedReplica(options.replica_id, process, mine)
    try:
        replica.address = await asyncio.to_thread(replica.receive)
        yield replica
    finally:
        replica.kill()
        process.close()
        mine.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return weights for the simulated model, different for each version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SHAPES.items()}
