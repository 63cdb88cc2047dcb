"""WeightReceiver: the engine's side of a push, prepare -> (upload) -> pause -> receive -> verify -> commit.

The trainer asks for all at once (`update`), or one by one if there is an upload or engines receive together.

Invariants: once a push has changed weights, they serve no token until it is complete. The version changes only at
commit. No push outlives its deadline, so a vanished trainer costs one deadline. A push that ends early is cleaned up
before anything else begins, even if the call that ended it is cancelled. If it had changed weights, it leaves the
engine BROKEN: running requests fail, so that other replicas continue them, new ones are refused, and the next complete
push heals it. Versions only grow within a call: where a push replaces a newer version, running requests fail.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager

import structlog

from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.telemetry import log as logging
from penstock.telemetry import spans
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import (
    REPLICA_STATE_BROKEN,
    REPLICA_STATE_READY,
    REPLICA_STATE_UPDATING,
    ReplicaState,
)
from penstock.weights.digest import XXH3, require_digest_kind
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang_plugin.variables import HeldParameter
from services.rollout.engine.weight_sync import push_metrics
from services.rollout.engine.weight_sync.incoming_push import (
    IncomingPush,
    Source,
    Stage,
    accept,
    require_fit,
    require_pausable,
    require_repeatable,
    require_same,
    require_version,
)
from services.rollout.engine.weight_sync.weight_sink import WeightSink

log = structlog.get_logger()

_CLEAN_UP_MARGIN_S = 5.0
_TAKEN = "the engine is given an older version, for an evaluation; continue with another replica"


class WeightReceiver:
    """Receives pushes, one at a time."""

    def __init__(
        self,
        sink: WeightSink,
        *,
        prepare_deadline_s: float,
        max_deadline_s: float,
        num_ranks: int = 1,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Use `open`.

        Args:
            sink: The engine.
            prepare_deadline_s: Maximum seconds to form a process group.
            max_deadline_s: Upper bound of a push's deadline.
            num_ranks: Processes among which the engine divides its weights.
            on_change: Called after each change of `state` or `version`.
        """
        self._sink = sink
        self._prepare_deadline_s = prepare_deadline_s
        self._max_deadline_s = max_deadline_s
        self._num_ranks = num_ranks
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[object] | None = None
        self._push: IncomingPush | None = None
        self._group_name = ""
        self._expected: dict[str, HeldParameter] = {}
        self._sound = True  # whether all weights are of one version
        self._committed: tuple[str, dict[str, int]] | None = None  # kind and digests of the weights of `version`
        self._background: set[asyncio.Task[None]] = set()
        self._clean_up: asyncio.Task[None] | None = None
        """Clean-up of the last push that ended early."""
        self._watchdog: asyncio.Task[None] | None = None
        self._paused_at = 0.0
        self.state: ReplicaState.ValueType = REPLICA_STATE_READY
        self.version = 0

    @property
    def is_busy(self) -> bool:
        """Whether a push is open, begins, or is cleaned up after, which may keep the engine from everything else."""
        is_cleaning_up = self._clean_up is not None and not self._clean_up.done()
        return self._push is not None or self._holder is not None or is_cleaning_up

    async def open(self) -> None:
        """Ask the engine for its parameters. Call it before the first push."""
        self._expected = dict(await self._sink.parameters())

    async def close(self) -> None:
        """End background work; the engine is shut down afterwards."""
        while tasks := list(self._background):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(
        self,
        push_id: str,
        version: int,
        source: Source,
        manifest: Manifest,
        *,
        deadline_s: float,
        digest: str = XXH3,
        replaces_newer: bool = False,
    ) -> None:
        """Check the push, and join its process group or check that its source can be read. End an unfinished push.

        Args:
            push_id: Unique name of the push.
            version: The policy version that it publishes.
            source: Where the weights come from.
            manifest: The tensors.
            deadline_s: Seconds within which the push must be complete, without the time for draining.
            digest: The kind of digest to compute of the received weights.
            replaces_newer: Whether the version may be older than the engine's.

        Raises:
            InvalidRequestError: the manifest does not fit this engine's model, the engine's version is newer and may
                not be replaced, or the deadline is out of bounds.
            NotReadyError: the source cannot be used here.
            UnavailableError: the process group did not form.
        """
        began = time.monotonic()
        require_fit(manifest, self._expected, is_shared=self._num_ranks > 1)
        require_digest_kind(digest)
        if not 0 < deadline_s <= self._max_deadline_s:
            raise InvalidRequestError(
                f"deadline_s = {deadline_s:g} must be above 0 and at most "
                f"{self._max_deadline_s:g}; lower trainer.weight_sync.transfer_timeout_s"
            )
        require_version(version, held=self.version, replaces_newer=replaces_newer)
        if self._push is not None:
            await self.abort(self._push.push_id, f"superseded by push {push_id}")
        async with self._holding():
            if self._push is not None:  # prepared while this call waited
                await self._end_push(self._push, f"superseded by push {push_id}")
            async with self._within(self._prepare_deadline_s + _CLEAN_UP_MARGIN_S, f"preparing push {push_id!r}"):
                transport, upload = await accept(
                    source, version, manifest, held=self.version, is_sound=self._sound, num_ranks=self._num_ranks
                )
                if isinstance(source, rollout_pb2.BroadcastSource) and source.group_name != self._group_name:
                    await self._leave_group()
                    await self._join_group(source)
            self._push = IncomingPush(
                push_id=push_id,
                version=version,
                transport=transport,
                manifest=manifest,
                digest=digest,
                upload=upload,
                deadline_s=deadline_s,
                started=began,
                deadline=time.monotonic() + deadline_s,
            )
            self._watchdog = self._start(self._give_up_at_deadline(self._push))
        spans.record("push.received", began, stage="prepare", version=version, push=push_id)

    async def upload(self, push_id: str, chunks: AsyncIterator[rollout_pb2.SendWeightsRequest]) -> int:
        """Store the blocks of a delta; return their size in bytes.

        Raises:
            InvalidRequestError: the push is not a delta, or the upload is not what was announced.
            UnavailableError: the blocks cannot be stored.
        """
        async with self._stage(push_id, "upload", Stage.PREPARED, Stage.PREPARED) as push:
            if push.upload is None:
                raise InvalidRequestError(
                    f"push {push_id!r} uses transport {push.transport.name}; only delta takes an upload"
                )
            await push.upload.fill(chunks)
            return push.upload.size_bytes

    async def pause(
        self,
        push_id: str,
        mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_RETRACT,
        drain_s: float = 0.0,
    ) -> None:
        """Stop generation at a token boundary. Time spent draining does not count towards the push's deadline.

        Raises:
            InvalidRequestError: the mode is unknown, or `drain_s` out of range.
        """
        require_pausable(mode, drain_s)
        push = self._require(push_id)
        if push.upload is not None and not push.upload.is_complete:
            raise NotReadyError(f"push {push_id!r} is a delta that was not uploaded; send it before the pause")
        if mode == rollout_pb2.PAUSE_MODE_DRAIN and push.stage is Stage.PREPARED:
            push.deadline += drain_s
        async with self._stage(push_id, "pause", Stage.PREPARED, Stage.PAUSED):
            self._enter(REPLICA_STATE_UPDATING)
            if push.version < self.version:
                self._sink.fail_running(_TAKEN)
            await self._sink.pause(mode, drain_s)

    async def receive(self, push_id: str) -> None:
        """Load all buckets."""
        async with self._stage(push_id, "receive", Stage.PAUSED, Stage.RECEIVED) as push:
            await self._sink.begin()
            push.stage = Stage.RECEIVING
            self._sound = False
            await self._sink.load(push.manifest, push.transport, push.digest)
            await self._sink.end()

    async def verify(self, push_id: str, digests: Mapping[str, int]) -> None:
        """Compare the digest of every parameter that the engine holds with the trainer's `digests`.

        Raises:
            ChecksumError: some differ; the push has ended.
        """
        async with self._stage(push_id, "verify", Stage.RECEIVED, Stage.VERIFIED) as push:
            push.held = dict(await self._sink.digests(push.digest))
            require_same(push.held, digests, push.manifest)

    async def commit(self, push_id: str) -> None:
        """Make the push's version the engine's, and let generation continue; the push is complete.

        Raises:
            NotReadyError: a second trainer has published other weights under this version, and they were committed.
        """
        async with self._stage(push_id, "commit", Stage.VERIFIED, Stage.COMMITTED) as push:
            require_repeatable(push, version=self.version, committed=self._committed)
            await self._sink.set_version(push.version)
            is_older = push.version < self.version
            self.version, self._sound, self._committed = push.version, True, (push.digest, push.held)
            logging.bind(version=push.version)
            if is_older:
                self._sink.fail_running(_TAKEN)  # calls that arrived after the pause and may want a newer version
            await self._finish(push)

    async def update(
        self,
        push_id: str,
        mode: rollout_pb2.PauseMode.ValueType,
        drain_s: float,
        digests: Mapping[str, int],
        *,
        announced: Awaitable[None] | None = None,
    ) -> AsyncGenerator[rollout_pb2.UpdateStage.ValueType, None]:
        """Pause, receive, verify and commit; iterate over the stages that are complete. Ending early ends the push.

        Args:
            push_id: The push.
            mode: What happens to running requests.
            drain_s: Seconds that they have to finish, if the mode drains.
            digests: The trainer's, of every parameter.
            announced: A call of `prepare` for this push, to be awaited first. None: it was prepared before.
        """
        try:
            if announced is not None:
                await announced
                yield rollout_pb2.UPDATE_STAGE_PREPARED
            await self.pause(push_id, mode, drain_s)
            yield rollout_pb2.UPDATE_STAGE_PAUSED
            await self.receive(push_id)
            yield rollout_pb2.UPDATE_STAGE_RECEIVED
            await self.verify(push_id, digests)
            await self.commit(push_id)
        except (asyncio.CancelledError, GeneratorExit):
            self._start(self._abort_quietly(push_id, "its call was cancelled"))
            raise

    async def abort(self, push_id: str, reason: str) -> ReplicaState.ValueType:
        """End the push in any stage, and return the resulting state. Repeating it changes nothing.

        Raises:
            NotReadyError: another push is prepared.
        """
        if self._push is None:
            await self._cleaned_up()
            return self.state
        push = self._require(push_id)
        if self._holder is not None and not (push.abort_reason and self._holder.cancelling()):
            push.abort_reason = push.abort_reason or reason
            self._holder.cancel()  # a stage that may wait forever
        async with self._holding():
            if self._push is not None and self._push.push_id == push_id:
                await self._end_push(self._push, reason)
        return self.state

    def _require(self, push_id: str) -> IncomingPush:
        if self._push is None or self._push.push_id != push_id:
            current = self._push.push_id if self._push else "none"
            raise NotReadyError(f"push {push_id!r} is not prepared (the prepared push: {current}); prepare it first")
        return self._push

    @asynccontextmanager
    async def _stage(self, push_id: str, what: str, before: Stage, after: Stage) -> AsyncIterator[IncomingPush]:
        """Run one stage of the right push, in order, within the push's deadline. A failure ends the push."""
        push = self._require(push_id)
        began = time.monotonic()
        async with self._holding():
            self._require(push_id)
            if push.stage is not before:
                raise NotReadyError(f"push {push_id!r} is {push.stage.name}; this call needs it {before.name}")
            started = time.monotonic()
            try:
                async with self._within(push.deadline - started, f"stage {after.name} of push {push_id!r}"):
                    yield push
                push.stage = after
                spans.record("push.received", began, stage=what, version=push.version, push=push_id)
                stage = "uploaded" if before is after else after.name  # an upload leaves the push as it is
                push_metrics.STAGE_SECONDS.labels(stage.lower()).observe(time.monotonic() - started)
            except PenstockError as error:
                spans.record("push.received", began, stage=what, version=push.version, push=push_id, error=str(error))
                await self._end_push(push, str(error))
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if push.abort_reason and task is not None:
                    task.uncancel()
                    raise UnavailableError(f"push {push_id!r} was ended: {push.abort_reason}") from None
                # The trainer's call ended, perhaps because the trainer did: end the push, but let this call return.
                self._start(self._abort_quietly(push_id, f"stage {after.name} was cancelled"))
                raise

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[None]:
        async with self._lock:
            await self._cleaned_up()
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
            raise DeadlineError(f"{what} exceeded its deadline") from None

    async def _finish(self, push: IncomingPush) -> None:
        await self._sink.resume()
        self._forget_push()
        self._enter(REPLICA_STATE_READY)
        push_metrics.PUSHES.labels("received").inc()
        push_metrics.PUSH_SECONDS.observe(time.monotonic() - push.started)
        log.info(
            "weights.received",
            push_id=push.push_id,
            size_bytes=push.manifest.num_bytes,
            transport=push.transport.name,
            elapsed_s=round(time.monotonic() - push.started, 3),
        )

    async def _end_push(self, push: IncomingPush, reason: str) -> None:
        """End the push: with the old weights, with the new ones if committed, or BROKEN."""
        was_paused = self.state == REPLICA_STATE_UPDATING
        self._forget_push()
        push_metrics.PUSHES.labels("aborted").inc()
        log.warning(
            "push.aborted", push_id=push.push_id, stage=push.stage.name, reason=reason, weights_sound=self._sound
        )
        if not self._sound:
            self._enter(REPLICA_STATE_BROKEN)
            self._sink.fail_running(
                f"push {push.push_id!r} ended half-way ({reason}); the engine waits for the next push"
            )
        self._clean_up = self._start(self._clean_up_after(push, was_paused=was_paused))
        await asyncio.shield(self._clean_up)

    async def _cleaned_up(self) -> None:
        """Wait for the clean-up of a push whose call has ended."""
        if self._clean_up is not None:
            await asyncio.wait((self._clean_up,))

    async def _clean_up_after(self, push: IncomingPush, *, was_paused: bool) -> None:
        try:
            async with self._within(self._prepare_deadline_s + _CLEAN_UP_MARGIN_S, "cleaning up"):
                if self._sound and was_paused:
                    await self._sink.resume()
                    self._enter(REPLICA_STATE_READY)
                # No later push uses the group, and its other members may be waiting for this one.
                await self._leave_group()
                if not self._sound:
                    await self._sink.end_if_open()
        except PenstockError as error:
            self._enter(REPLICA_STATE_BROKEN)
            self._sink.fail_running(f"push {push.push_id!r} could not be cleaned up: {error}")
            log.error("push.clean_up_failed", push_id=push.push_id, reason=str(error))

    async def _join_group(self, source: rollout_pb2.BroadcastSource) -> None:
        try:
            await self._sink.join_group(source)
        except asyncio.CancelledError:
            self._start(self._sink.leave_group(source.group_name))  # it may still form, but has no user
            raise
        self._group_name = source.group_name

    async def _leave_group(self) -> None:
        if self._group_name:
            name, self._group_name = self._group_name, ""
            await self._sink.leave_group(name)

    async def _give_up_at_deadline(self, push: IncomingPush) -> None:
        while (left_s := push.deadline - time.monotonic()) > 0:  # noqa: ASYNC110 - a drain moves the deadline
            await asyncio.sleep(left_s)
        await self._abort_quietly(
            push.push_id, f"not complete within its deadline of {push.deadline_s:g} s; is the trainer gone?"
        )

    async def _abort_quietly(self, push_id: str, reason: str) -> None:
        try:
            await self.abort(push_id, reason)
        except NotReadyError:
            log.debug("push.gone", push_id=push_id)

    def _forget_push(self) -> None:
        if self._push is not None and self._push.upload is not None:
            self._push.upload.close()
        self._push = None
        if self._watchdog is not None and self._watchdog is not asyncio.current_task():
            self._watchdog.cancel()
        self._watchdog = None

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run as a task that `close` ends."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _enter(self, state: ReplicaState.ValueType) -> None:
        if REPLICA_STATE_UPDATING in (state, self.state) and state != self.state:
            if state == REPLICA_STATE_UPDATING:
                self._paused_at = time.monotonic()
            else:
                push_metrics.PAUSE_SECONDS.observe(time.monotonic() - self._paused_at)
                name = ReplicaState.Name(state).removeprefix("REPLICA_STATE_")
                spans.record("paused", self._paused_at, version=self.version, then=name)
        self.state = state
        self._on_change()
