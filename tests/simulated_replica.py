"""A rollout engine without SGLang, for tests of pushes: a process with a real lease, receiver and process group.

Everything is the engine's own code but for the innermost part: tensors in memory stand for the model, and they are
loaded by one thread, as SGLang loads them in its one scheduler. It can be told to fail at any point of a push.
"""

import asyncio
import datetime
import multiprocessing
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock import log
from penstock.bus import leases
from penstock.bus.connection import Bus, connect
from penstock.bus.replica_lease import write_replica
from penstock.config import BusConfig, LogConfig
from penstock.errors import NotReadyError, UnavailableError
from penstock.rpc.server import RpcServer, service_name
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from penstock.weights.delta import apply_deltas
from penstock.weights.digest import tensor_digests
from penstock.weights.manifest import Manifest
from services.rollout.engine.servicers import RolloutServicer
from services.rollout.engine.sglang_variables import HeldParameter
from services.rollout.engine.weight_reception import read_into, receive_into
from services.rollout.engine.weights import Source, WeightReceiver

Action = Literal["refuse", "die", "hang", "corrupt"]
"""refuse: answer with an error. die: kill -9. hang: never answer. corrupt: change one value, and go on."""

Point = Literal["GetReplica", "PrepareWeights", "join", "PauseGeneration", "ReceiveWeights", "bucket", "VerifyWeights",
    "CommitWeights", "ResumeGeneration", "AbortWeights"]  # fmt: skip
"""Where: at the beginning of a call, before joining the group, or when the first bucket has been loaded."""

SHAPES: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed.weight": (torch.float32, (64, 32)),
    "norm.weight": (torch.bfloat16, (7,)),
    "head.weight": (torch.bfloat16, (128, 33)),
    "scale": (torch.float32, (1,)),
}
"""The model that all simulated replicas have."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one point, and how often."""

    action: Action
    times: int = 1


@dataclass(slots=True, kw_only=True)
class Report:
    """What a replica says of itself."""

    state: int
    version: int
    digests: dict[str, int]
    calls: list[str]
    """Names of the calls so far."""
    groups: list[str]
    """Groups joined so far."""
    num_paused: int
    num_resumed: int
    loads: list[str]
    """Where each push that was received came from: group, snapshot or delta."""
    serving_digests: list[dict[str, int]]
    """What it held each time it began to serve again."""


@dataclass(slots=True, kw_only=True)
class _Options:
    """What the process is started with."""

    url: str
    run: str
    lease_ttl_s: float
    replica_id: str
    state: int
    faults: dict[str, Fault]
    group_timeout_s: float
    reported_id: str
    port: int
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    audits: bool


@dataclass(slots=True)
class _Faults:
    left: dict[str, Fault] = field(default_factory=dict)

    def take(self, point: str) -> Action | None:
        """The action for now."""
        fault = self.left.get(point)
        if fault is None or fault.times < 1:
            return None
        self.left[point] = Fault(fault.action, fault.times - 1)
        return fault.action

    async def strike(self, point: str, corrupt: Callable[[], None] = lambda: None) -> None:
        """Do what is to be done at `point`."""
        action = self.take(point)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "refuse":
            raise NotReadyError(f"told to refuse at {point}")
        elif action == "hang":
            await asyncio.Event().wait()
        elif action == "corrupt":
            corrupt()


class MemorySink:
    """Implements `weights.WeightSink` with tensors in memory."""

    def __init__(self, options: _Options, faults: _Faults) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in options.shapes.items()}
        self.groups: list[str] = []
        self.loads: list[str] = []
        self.num_paused = 0
        self.serving_digests: list[dict[str, int]] = []
        self._faults = faults
        self._timeout = datetime.timedelta(seconds=options.group_timeout_s)
        self._audits = options.audits
        self._thread = ThreadPoolExecutor(1)
        self._group: Any = None

    async def join_group(self, group: rollout_pb2.WeightGroup) -> None:
        self.groups.append(group.name)
        await self._faults.strike("join")
        await self._run(lambda: self._join(group))

    def _join(self, group: rollout_pb2.WeightGroup) -> None:
        # As SGLang's init_custom_process_group does it.
        address = f"tcp://{group.master_host}:{group.master_port}"
        rendezvous = dist.rendezvous(address, group.rank_offset, group.world_size, timeout=self._timeout)
        store, rank, world_size = next(rendezvous)
        store.set_timeout(self._timeout)
        self._group, _ = distributed_c10d._new_process_group_helper(
            world_size, rank, [], dist.Backend(group.backend), dist.PrefixStore(group.name, store),
            group_name=group.name, backend_options=None, timeout=self._timeout,
        )  # fmt: skip
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

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
        self.serving_digests.append(self.digests() if self._audits else {})

    async def begin(self) -> None: ...
    async def end(self) -> None: ...
    async def end_if_open(self) -> None: ...
    async def set_version(self, version: int) -> None: ...
    def fail_running(self, reason: str) -> None: ...

    async def take(self, manifest: Manifest, source: Source) -> None:
        self.loads.append("delta" if source.is_delta else "snapshot" if source.folder else "group")
        if source.is_delta:
            await self._run(lambda: apply_deltas(self.tensors, Path(source.folder)))
            return
        if source.folder:
            await self._run(lambda: read_into(self.tensors, Path(source.folder)))
            return
        # In two parts, so that something can happen between them.
        for buckets in (manifest.buckets[:1], manifest.buckets[1:]):
            await self._run(lambda: receive_into(self.tensors, buckets, self._group, device=torch.device("cpu")))  # noqa: B023
            await self._faults.strike("bucket")

    def corrupt(self) -> None:
        """Change the last bit of one value."""
        self.tensors["norm.weight"].view(torch.int16)[3] ^= 1

    async def parameters(self) -> dict[str, HeldParameter]:
        digests = await asyncio.get_running_loop().run_in_executor(self._thread, self.digests)
        return {
            name: HeldParameter(digest=digests[name], dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }  # fmt: skip

    def digests(self) -> dict[str, int]:
        """Name to digest, now."""
        return tensor_digests(self.tensors.items())

    async def _run(self, work: Callable[[], None]) -> None:
        if message := await asyncio.get_running_loop().run_in_executor(self._thread, _message_of, work):
            raise UnavailableError(f"simulated SGLang: {message}")


def _message_of(work: Callable[[], None]) -> str:
    """What went wrong, as SGLang answers it: as text, so that no traceback keeps a group alive."""
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


class _View:
    """Implements what the servicer needs of `servicers.ReplicaView`."""

    def __init__(self, options: _Options, receiver: WeightReceiver) -> None:
        self.address = ""
        self.state_override = options.state
        self._options = options
        self._receiver = receiver

    async def refresh(self) -> None: ...

    def describe(self, replica_id: str = "") -> common_pb2.Replica:
        return common_pb2.Replica(
            replica_id=replica_id or self._options.reported_id or self._options.replica_id,
            address=self.address,
            role=common_pb2.REPLICA_ROLE_UNIFIED,
            state=self.state_override or self._receiver.state,
            policy_version=self._receiver.version,
        )

    def lease(self) -> bytes:
        return write_replica(self.describe(self._options.replica_id))


class _FaultyServicer(RolloutServicer):
    """The engine's servicer, with a fault before each call."""

    calls: list[str]


def _faulty(name: str) -> Any:
    async def method(self: Any, request: Any, context: Any) -> Any:
        self.calls.append(name)
        await self.faults.strike(name, self.sink.corrupt)
        return await getattr(RolloutServicer, name)(self, request, context)

    return method


for _name in ("GetReplica", "PrepareWeights", "PauseGeneration", "ReceiveWeights", "VerifyWeights", "CommitWeights",
              "ResumeGeneration", "AbortWeights"):  # fmt: skip
    setattr(_FaultyServicer, _name, _faulty(_name))


async def _main(options: _Options, control: Connection) -> None:
    log.configure(LogConfig(level="error"), service=options.replica_id)
    faults = _Faults(dict(options.faults))
    sink = MemorySink(options, faults)
    changed = asyncio.Event()
    receiver = WeightReceiver(
        sink, prepare_deadline_s=options.group_timeout_s, push_deadline_s=60.0, on_change=changed.set
    )
    await receiver.open()
    view = _View(options, receiver)
    servicer = _FaultyServicer(receiver, view, None)  # type: ignore[arg-type]  # it has no calls to drain
    servicer.calls, servicer.faults, servicer.sink = [], faults, sink  # type: ignore[attr-defined]
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
            faults.left = dict(value)
        elif command == "state":
            view.state_override = value
            changed.set()
        control.send(
            Report(
                state=receiver.state,
                version=receiver.version,
                digests=sink.digests(),
                calls=list(servicer.calls),
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
            while True:
                await changed.wait()
                changed.clear()
                await lease.renew()


def _process(options: _Options, control: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(_main(options, control))


class SimulatedReplica:
    """The test's handle on a replica."""

    def __init__(self, replica_id: str, process: Any, control: Connection) -> None:
        self.replica_id = replica_id
        self.process = process
        self.address = ""
        self._control = control

    async def report(self) -> Report:
        """What it says of itself now."""
        return await self._ask("report", None)

    async def set_faults(self, **faults: Fault) -> None:
        """From now on these, and none of before."""
        await self._ask("faults", faults)

    async def set_state(self, state: int) -> None:
        """Claim to be in `state` (0: the true one)."""
        await self._ask("state", state)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(10)

    async def _ask(self, command: str, value: object) -> Any:
        self._control.send((command, value))
        return await asyncio.to_thread(self.receive)

    def receive(self, timeout_s: float = 60.0) -> Any:
        """The next word of the process. Blocking."""
        if not self._control.poll(timeout_s):
            raise TimeoutError(f"simulated replica {self.replica_id} says nothing")
        return self._control.recv()


@asynccontextmanager
async def simulated_replica(
    bus: Bus,
    *,
    replica_id: str = "",
    state: int = 0,
    group_timeout_s: float = 20.0,
    reported_id: str = "",
    port: int = 0,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = SHAPES,
    audits: bool = True,
    **faults: Fault,
) -> AsyncIterator[SimulatedReplica]:
    """Run a replica during the context; `state` is what it claims to be in, `reported_id` what it calls itself.

    With `audits` it notes the digests of what it holds whenever it begins to serve, which reads every byte.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once for all
    mine, its = context.Pipe()
    options = _Options(
        url=bus.config.url, run=bus.prompts.name.removesuffix("_PROMPTS"), lease_ttl_s=bus.config.lease_ttl_s,
        replica_id=replica_id or f"engine-{uuid.uuid4().hex[:8]}", state=state, faults=dict(faults),
        group_timeout_s=group_timeout_s, reported_id=reported_id, port=port, shapes=shapes, audits=audits,
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
        mine.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Weights for the simulated model, others for each version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SHAPES.items()}
