"""WeightReceiver: the engine's side of a push, prepare -> (upload) -> pause -> receive -> verify -> commit -> resume.

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
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import structlog

from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import (
    REPLICA_STATE_BROKEN,
    REPLICA_STATE_READY,
    REPLICA_STATE_UPDATING,
    ReplicaState,
)
from penstock.weights.digest import XXH3, require_digest_kind
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang_variables import HeldParameter
from services.rollout.engine.weight_sink import WeightSink
from services.rollout.engine.weight_source import Announced, Source, Spool, check_base, check_group, check_readable

log = structlog.get_logger()

_CLEAN_UP_MARGIN_S = 5.0


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
    digest: str
    """The kind of digest that is asked for."""
    spool: Spool | None = None
    """For what is uploaded."""
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
        announced: Announced,
        manifest: Manifest,
        digest: str = XXH3,
    ) -> None:
        """Check the push, and join its group, unless it is the group of the push before, or see that its source can
        be read. An unfinished push is given up.

        Raises:
            InvalidRequestError: the manifest does not fit this engine's model, or the engine's version is newer.
            NotReadyError: the source cannot be used here.
            UnavailableError: the group did not form.
        """
        self._check_manifest(manifest)
        require_digest_kind(digest)
        if version < max(1, self.version):
            raise InvalidRequestError(
                f"policy_version = {version} is older than this engine's {self.version}; versions only grow"
            )
        if self._push is not None:
            await self.abort(self._push.push_id, f"superseded by push {push_id}")
        spool = None
        if isinstance(announced, rollout_pb2.WeightGroup):
            source = check_group(announced)
        elif isinstance(announced, rollout_pb2.WeightStream):
            check_base(announced.base_version, self.version, sound=self._sound)
            spool = await asyncio.to_thread(Spool, announced.size_bytes)
            source = Source(pieces=spool.path, is_delta=announced.base_version > 0)
        else:
            source = await asyncio.to_thread(check_readable, announced, version, manifest)
        async with self._holding():
            async with self._within(self._prepare_deadline_s + _CLEAN_UP_MARGIN_S, "forming the weight group"):
                if isinstance(announced, rollout_pb2.WeightGroup) and announced.name != self._group_name:
                    await self._leave_group()
                    await self._join_group(announced)
            self._push = _Push(
                push_id=push_id,
                version=version,
                source=source,
                manifest=manifest,
                digest=digest,
                spool=spool,
                deadline=time.monotonic() + self._push_deadline_s,
            )
            self._watchdog = asyncio.create_task(self._give_up_at_deadline(self._push))

    async def upload(self, push_id: str, chunks: AsyncIterator[rollout_pb2.SendWeightsRequest]) -> int:
        """Take the pieces of a push that comes as a stream; returns how many bytes.

        The stages that follow have the push's deadline anew.

        Raises:
            InvalidRequestError: the push is none, or other bytes come than announced.
            UnavailableError: they cannot be kept.
        """
        async with self._stage(push_id, Stage.PREPARED, Stage.PREPARED) as push:
            if push.spool is None:
                raise InvalidRequestError(f"push {push_id!r} comes from a {push.source.kind}; it takes no upload")
            await push.spool.fill(chunks)
            push.deadline = time.monotonic() + self._push_deadline_s
            return push.spool.size_bytes

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
        if push.spool is not None and not push.spool.is_full:
            raise NotReadyError(f"push {push_id!r} comes as a stream, which has not come yet; send it before the pause")
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
        async with self._stage(push_id, Stage.RECEIVED, Stage.VERIFIED) as push:
            return dict(await self._sink.digests(push.digest))

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
            source=push.source.kind,
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
        if self._push is not None and self._push.spool is not None:
            self._push.spool.close()
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
