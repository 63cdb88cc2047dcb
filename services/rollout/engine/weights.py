"""WeightReceiver: the engine's side of a push, prepare -> pause -> receive -> verify -> commit -> resume.

Invariants: weights that were touched serve no token until a push was completed; the version changes at commit and
nowhere else; no push outlives its deadline, so a trainer that vanishes costs `push_deadline_s`. A push that ends
half-way leaves the engine BROKEN: running requests have failed, so that others play them, new ones are refused, and the
next complete push heals it.
"""

import asyncio
import dataclasses
import enum
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import (
    REPLICA_STATE_BROKEN,
    REPLICA_STATE_READY,
    REPLICA_STATE_UPDATING,
    ReplicaState,
)
from penstock.weights.delta import check_delta
from penstock.weights.manifest import Manifest
from penstock.weights.snapshot import check_snapshot
from services.rollout.engine.sglang_variables import HeldParameter

log = structlog.get_logger()

_CLEAN_UP_MARGIN_S = 5.0


class WeightSink(Protocol):
    """What the receiver needs of an engine (`sglang_weights.SglangWeights`)."""

    async def join_group(self, group: rollout_pb2.WeightGroup) -> None: ...
    async def leave_group(self, name: str) -> None: ...
    async def pause(self, mode: rollout_pb2.PauseMode.ValueType, drain_s: float) -> None: ...
    async def resume(self) -> None: ...
    async def begin(self) -> None: ...
    async def take(self, manifest: Manifest, source: "Source") -> None: ...
    async def end(self) -> None: ...
    async def end_if_open(self) -> None: ...
    async def parameters(self) -> Mapping[str, HeldParameter]: ...
    async def set_version(self, version: int) -> None: ...
    def fail_running(self, reason: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the bytes of a push come from: one of the two."""

    group_name: str = ""
    """A group that was joined."""
    folder: str = ""
    """A snapshot."""
    is_delta: bool = False
    """What changed against the version that is held, instead of all."""


class Stage(enum.IntEnum):
    """How far a push has come."""

    PREPARED = 1
    PAUSED = 2
    RECEIVING = 3
    """Weights are touched from here on."""
    RECEIVED = 4
    VERIFIED = 5
    COMMITTED = 6
    """Weights are sound again from here on."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Push:
    push_id: str
    version: int
    source: Source
    manifest: Manifest
    deadline: float
    """Of `time.monotonic()`."""
    stage: Stage = Stage.PREPARED
    abort_reason: str = ""
    """Why it is being ended while one of its stages still runs."""
    started: float = dataclasses.field(default_factory=time.monotonic)


class WeightReceiver:
    """Takes pushes, one at a time."""

    def __init__(
        self,
        sink: WeightSink,
        *,
        prepare_deadline_s: float,
        push_deadline_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Use `open`. `on_change` is called after each change of `state` or `version`."""
        self._sink = sink
        self._prepare_deadline_s = prepare_deadline_s
        self._push_deadline_s = push_deadline_s
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[object] | None = None
        self._push: _Push | None = None
        self._group_name = ""
        self._expected: dict[str, HeldParameter] = {}
        self._sound = True  # whether the weights are those of one version, whole
        self._background: set[asyncio.Task[None]] = set()
        self._watchdog: asyncio.Task[None] | None = None
        self.state: ReplicaState.ValueType = REPLICA_STATE_READY
        self.version = 0

    async def open(self) -> None:
        """Learn which parameters the engine has; until then no push is taken."""
        self._expected = dict(await self._sink.parameters())

    async def close(self) -> None:
        """End background work; the engine is shut down after this."""
        tasks = [*self._background, *([self._watchdog] if self._watchdog else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(
        self,
        push_id: str,
        version: int,
        transport: rollout_pb2.WeightGroup | rollout_pb2.WeightSnapshot,
        manifest: Manifest,
    ) -> None:
        """Check the push, and join its group, unless it is the group of the push before, or see that its snapshot can
        be read. An unfinished push is given up.

        Raises:
            InvalidRequestError: the manifest does not fit this engine's model, or the engine's version is newer.
            NotReadyError: the snapshot is not to be seen here.
            UnavailableError: the group did not form.
        """
        self._check_manifest(manifest)
        if version < max(1, self.version):
            raise InvalidRequestError(
                f"policy_version = {version} is older than this engine's {self.version}; versions only grow"
            )
        if self._push is not None:
            await self.abort(self._push.push_id, f"superseded by push {push_id}")
        if isinstance(transport, rollout_pb2.WeightSnapshot):
            source = await self._check_snapshot(transport, version, manifest)
        else:
            _check_group(transport)
            source = Source(group_name=transport.name)
        async with self._holding():
            async with self._within(self._prepare_deadline_s + _CLEAN_UP_MARGIN_S, "forming the weight group"):
                if isinstance(transport, rollout_pb2.WeightGroup) and transport.name != self._group_name:
                    await self._leave_group()
                    await self._join_group(transport)
            self._push = _Push(
                push_id=push_id,
                version=version,
                source=source,
                manifest=manifest,
                deadline=time.monotonic() + self._push_deadline_s,
            )
            self._watchdog = asyncio.create_task(self._give_up_at_deadline(self._push))

    async def pause(
        self,
        push_id: str,
        mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_RETRACT,
        drain_s: float = 0.0,
    ) -> None:
        """Stop generation at a token boundary. To drain is part of it and does not count for the push's deadline.

        Raises:
            InvalidRequestError: no such mode, or a wrong `drain_s`.
        """
        if mode not in rollout_pb2.PauseMode.values():
            raise InvalidRequestError(f"mode = {mode} is none that this engine knows; push.mode names them")
        if not (math.isfinite(drain_s) and drain_s >= 0):
            raise InvalidRequestError(f"drain_s = {drain_s} must be 0 or greater")
        push = self._require(push_id)
        if mode == rollout_pb2.PAUSE_MODE_DRAIN and push.stage is Stage.PREPARED:
            push.deadline += drain_s
        async with self._stage(push_id, Stage.PREPARED, Stage.PAUSED):
            self._enter(REPLICA_STATE_UPDATING)
            await self._sink.pause(mode, drain_s)

    async def receive(self, push_id: str) -> Manifest:
        """Take all buckets; returns what was taken."""
        async with self._stage(push_id, Stage.PAUSED, Stage.RECEIVED) as push:
            await self._sink.begin()
            push.stage = Stage.RECEIVING
            self._sound = False
            await self._sink.take(push.manifest, push.source)
            await self._sink.end()
            return push.manifest

    async def verify(self, push_id: str) -> dict[str, int]:
        """The digest of every parameter that the engine holds now."""
        async with self._stage(push_id, Stage.RECEIVED, Stage.VERIFIED):
            return {name: held.digest for name, held in (await self._sink.parameters()).items()}

    async def commit(self, push_id: str) -> None:
        """Make the push's version the engine's."""
        async with self._stage(push_id, Stage.VERIFIED, Stage.COMMITTED) as push:
            await self._sink.set_version(push.version)
            self.version, self._sound = push.version, True

    async def resume(self, push_id: str) -> None:
        """Let generation go on; the push is complete."""
        async with self._stage(push_id, Stage.COMMITTED, Stage.COMMITTED) as push:
            await self._finish(push)

    async def abort(self, push_id: str, reason: str) -> ReplicaState.ValueType:
        """End the push, wherever it stands, and return the state that it leaves. Repeating it changes nothing.

        Raises:
            NotReadyError: another push runs.
        """
        if self._push is None:
            return self.state
        push = self._require(push_id)
        if self._holder is not None:
            push.abort_reason = reason
            self._holder.cancel()  # a stage that waits for something which may never come
        async with self._holding():
            if self._push is not None and self._push.push_id == push_id:
                await self._end_half_way(self._push, reason)
        return self.state

    async def _check_snapshot(self, snapshot: rollout_pb2.WeightSnapshot, version: int, manifest: Manifest) -> Source:
        folder, base_version = Path(snapshot.folder), snapshot.base_version
        if base_version and (base_version != self.version or not self._sound):
            held = f"version {self.version}" if self._sound else "broken weights"
            raise NotReadyError(f"the delta is against version {base_version}, but this engine holds {held}; send all")
        if base_version:
            await asyncio.to_thread(check_delta, folder, base_version)
        else:
            await asyncio.to_thread(check_snapshot, folder, version, manifest)
        return Source(folder=snapshot.folder, is_delta=bool(base_version))

    def _check_manifest(self, manifest: Manifest) -> None:
        pushed = {spec.name: spec for spec in manifest.tensors}
        missing, unknown = self._expected.keys() - pushed.keys(), pushed.keys() - self._expected.keys()
        if missing or unknown:
            raise InvalidRequestError(
                f"manifest does not fit this engine's model: {len(missing)} parameters are missing "
                f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}; push named_parameters() of "
                "the same architecture"
            )
        for name, held in self._expected.items():
            spec = pushed[name]
            if (spec.dtype, spec.shape) != (held.dtype, held.shape):
                raise InvalidRequestError(
                    f"manifest: {name} is {spec.dtype}{list(spec.shape)}, the engine holds {held.dtype}"
                    f"{list(held.shape)}; cast before pushing, or set rollout.dtype"
                )

    def _require(self, push_id: str) -> _Push:
        if self._push is None or self._push.push_id != push_id:
            current = self._push.push_id if self._push else "none"
            raise NotReadyError(f"push {push_id!r} is not the one that was prepared ({current}); prepare it first")
        return self._push

    @asynccontextmanager
    async def _stage(self, push_id: str, before: Stage, after: Stage) -> AsyncIterator[_Push]:
        """Run one stage: right push, right order, inside the push's deadline. A failure ends the push."""
        push = self._require(push_id)
        async with self._holding():
            self._require(push_id)
            if push.stage is not before:
                raise NotReadyError(f"push {push_id!r} is {push.stage.name}; this call needs it {before.name}")
            try:
                async with self._within(push.deadline - time.monotonic(), f"stage {after.name} of push {push_id!r}"):
                    yield push
                push.stage = after
            except PenstockError as error:
                await self._end_half_way(push, str(error))
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if push.abort_reason and task is not None:
                    task.uncancel()
                    raise UnavailableError(f"push {push_id!r} was ended: {push.abort_reason}") from None
                # The trainer's call is gone, perhaps the trainer too: end the push, but let this call return.
                self._start(self._abort_quietly(push_id, f"stage {after.name} was cancelled"))
                raise

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[None]:
        async with self._lock:
            self._holder = asyncio.current_task()
            try:
                yield
            finally:
                self._holder = None

    @asynccontextmanager
    async def _within(self, seconds: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                yield
        except TimeoutError:
            raise DeadlineError(f"{what} ran into its deadline") from None

    async def _finish(self, push: _Push) -> None:
        await self._sink.resume()
        self._forget_push()
        self._enter(REPLICA_STATE_READY)
        log.info(
            "weights.received",
            push_id=push.push_id,
            policy_version=push.version,
            size_bytes=push.manifest.num_bytes,
            is_snapshot=bool(push.source.folder),
            is_delta=push.source.is_delta,
            elapsed_s=round(time.monotonic() - push.started, 3),
        )

    async def _end_half_way(self, push: _Push, reason: str) -> None:
        """Leave the push behind: with the old weights, with the new ones if they were committed, or BROKEN."""
        was_paused = self.state == REPLICA_STATE_UPDATING
        self._forget_push()
        log.warning(
            "push.aborted", push_id=push.push_id, stage=push.stage.name, reason=reason, weights_sound=self._sound
        )
        if not self._sound:
            self._enter(REPLICA_STATE_BROKEN)
            self._sink.fail_running(
                f"push {push.push_id!r} ended half-way ({reason}); the engine waits for the next one"
            )
        try:
            async with self._within(self._prepare_deadline_s + _CLEAN_UP_MARGIN_S, "cleaning up"):
                if self._sound and was_paused:
                    await self._sink.resume()
                    self._enter(REPLICA_STATE_READY)
                # No other push will use the group, and its other members may be waiting for this one.
                await self._leave_group()
                if not self._sound:
                    await self._sink.end_if_open()
        except PenstockError as error:
            self._enter(REPLICA_STATE_BROKEN)
            self._sink.fail_running(f"push {push.push_id!r} could not be cleaned up: {error}")
            log.error("push.clean_up_failed", push_id=push.push_id, reason=str(error))

    async def _join_group(self, group: rollout_pb2.WeightGroup) -> None:
        try:
            await self._sink.join_group(group)
        except asyncio.CancelledError:
            self._start(self._sink.leave_group(group.name))  # it may yet form, with nobody to use it
            raise
        self._group_name = group.name

    async def _leave_group(self) -> None:
        if self._group_name:
            name, self._group_name = self._group_name, ""
            await self._sink.leave_group(name)

    async def _give_up_at_deadline(self, push: _Push) -> None:
        while (left_s := push.deadline - time.monotonic()) > 0:  # noqa: ASYNC110 - a drain moves the deadline
            await asyncio.sleep(left_s)
        self._watchdog = None  # so that ending the push does not cancel this task
        await self._abort_quietly(push.push_id, f"not complete within {self._push_deadline_s} s; is the trainer gone?")

    async def _abort_quietly(self, push_id: str, reason: str) -> None:
        try:
            await self.abort(push_id, reason)
        except NotReadyError:
            log.debug("push.gone", push_id=push_id)

    def _forget_push(self) -> None:
        self._push = None
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _enter(self, state: ReplicaState.ValueType) -> None:
        self.state = state
        self._on_change()


def _check_group(group: rollout_pb2.WeightGroup) -> None:
    if not group.name or group.rank_offset < 1 or group.world_size <= group.rank_offset:
        raise InvalidRequestError(
            f"group {group.name!r}: rank_offset {group.rank_offset} and world_size {group.world_size} do not form "
            "a group in which the trainer is rank 0"
        )
