"""SGLang's side of a push: the receiver's calls, made so that they cannot wedge SGLang.

SGLang answers such calls one at a time, and would mistake an answer that no caller awaits for the answer to the next
call. So every call is awaited to its end, even if its caller has given up, and the next call waits for it.
"""

import asyncio
import collections
import functools
import operator
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from penstock.errors import UnavailableError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.sglang_plugin.transports import Transport
from services.rollout.engine.sglang_plugin.variables import (
    DIGEST_ACTION,
    PARAMETERS_ACTION,
    HeldParameter,
    name_to_join,
    parse_parameter,
)
from services.rollout.engine.sglang_plugin.version_keys import IN_PLACE, RETRACT
from services.rollout.engine.sglang_plugin.weight_loader import LoadOrder

log = structlog.get_logger()

_POLL_S = 0.01

ResultT = TypeVar("ResultT")


class SglangWeights:
    """Implements `WeightSink` with an SGLang engine."""

    def __init__(self, engine: SglangEngine, *, group_timeout_s: float) -> None:
        """Act on `engine`.

        Args:
            engine: The engine.
            group_timeout_s: For how long trainers wait for members of a process group.
        """
        self._engine = engine
        self._group_timeout_s = group_timeout_s
        self._tokenizer_manager = engine.tokenizer_manager
        self._is_proven = False
        self._has_begun = False
        """Whether an update was begun and may still be open."""
        self._last: asyncio.Task[Any] | None = None

    async def join_group(self, source: rollout_pb2.BroadcastSource) -> None:
        """Join the process group; return when it has formed. SGLang generates nothing meanwhile.

        Raises:
            UnavailableError: the group did not form, or SGLang was busy for as long as the trainer waits.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        before = time.monotonic() + self._group_timeout_s
        request = InitWeightsUpdateGroupReqInput(
            master_address=source.master_host,
            master_port=source.master_port,
            rank_offset=source.rank_offset,
            world_size=source.world_size,
            group_name=name_to_join(source.group_name, before=before),
            backend=source.backend,
        )
        await self._succeed(
            "join the process group", lambda: self._tokenizer_manager.init_weights_update_group(request)
        )

    async def leave_group(self, name: str) -> None:
        """Leave the process group; a group that has ended is no error."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        success, message = await self._call(lambda: self._tokenizer_manager.destroy_weights_update_group(request))
        if not success:
            log.debug("process_group.leave_failed", process_group=name, reason=message)

    async def pause(self, mode: rollout_pb2.PauseMode.ValueType, drain_s: float) -> None:
        """Stop at a token boundary; `mode` decides what happens to running requests, see the contract.

        A PD peer ends them in every mode, because the other peer's results do not match the new weights.
        """
        if self._engine.is_disaggregated:
            self._engine.barrier.close()
            self._engine.fail_running("weights change; continue with a PD pair that holds the new version")
            await self._flush()
            await self._pause(IN_PLACE)  # nothing runs, so there is nothing to retract
            return
        if mode == rollout_pb2.PAUSE_MODE_IN_PLACE:
            await self._pause(IN_PLACE)  # the prefix cache is keyed by version
            return
        if mode == rollout_pb2.PAUSE_MODE_DRAIN:
            await self._drain(drain_s)
        await self._pause(RETRACT)
        await self._flush()

    async def _flush(self) -> None:
        """Empty the caches once nothing uses them."""
        # SGLang refuses until it has cleared the batch of a request that just ended, and in a PD peer while KV is in
        # transfer.
        while not (await self._call(self._tokenizer_manager.flush_cache)).success:  # noqa: ASYNC110 - SGLang has no event
            await asyncio.sleep(_POLL_S)

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._call(lambda: self._tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    async def _drain(self, seconds: float) -> None:
        """Hold back new requests and wait until those inside SGLang have finished."""
        manager = self._tokenizer_manager
        async with manager.is_pause_cond:
            manager.is_pause = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await manager.model_update_lock.is_locked():  # noqa: ASYNC110 - SGLang has no event
                    await asyncio.sleep(_POLL_S)

    async def resume(self) -> None:
        """Resume generation; retracted requests compute their prefix again with the current weights."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        await self._call(lambda: self._tokenizer_manager.continue_generation(request))
        self._engine.barrier.open()

    async def begin(self) -> None:
        """Open an update, after closing any that was left open."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._has_begun:
            await self.end_if_open()
        self._has_begun = True
        await self._succeed(
            "begin the update", lambda: self._tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput())
        )

    async def load(self, manifest: Manifest, transport: Transport, digest: str) -> None:
        """Receive all buckets and load them; `digest` is the kind that will be asked for.

        SGLang's own loader loads the first push, whose digests prove where each parameter is. Later pushes write into
        the parameters directly. Adapters are always merged directly; the digests of their base prove the addresses.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        specs = manifest.tensors
        order = LoadOrder(
            bucket_lengths=tuple(len(bucket) for bucket in manifest.buckets),
            transport=transport,
            is_direct=self._is_proven,
            digest=digest,
        )
        request = UpdateWeightsFromDistributedReqInput(
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group_name="",  # the order names it
            load_format=order.to_load_format(),
            flush_cache=False,
        )
        await self._succeed(
            "load the weights", lambda: self._tokenizer_manager.update_weights_from_distributed(request)
        )

    async def end(self) -> None:
        """Close the update: SGLang recomputes what it derives from weights."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._succeed(
            "end the update", lambda: self._tokenizer_manager.end_weight_update(EndWeightUpdateReqInput())
        )
        self._has_begun = False

    async def end_if_open(self) -> None:
        """Close an update that a failed push left open."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._call(lambda: self._tokenizer_manager.end_weight_update(EndWeightUpdateReqInput()))
        self._has_begun = False

    async def parameters(self) -> dict[str, HeldParameter]:
        """Return the engine's parameters by checkpoint name."""
        ranks = await self._check(PARAMETERS_ACTION)
        return {name: parse_parameter(text) for name, text in ranks[0].items()}

    async def digests(self, kind: str) -> dict[str, int]:
        """Return the digest of every parameter by checkpoint name. Reads every byte.

        If processes hold different bytes that should be equal, the digest matches neither.
        """
        found: dict[str, set[int]] = collections.defaultdict(set)
        for rank in await self._check(DIGEST_ACTION + kind):
            for name, text in rank.items():
                found[name].add(int(text))
        return {name: functools.reduce(operator.xor, digests) for name, digests in found.items()}

    async def _check(self, action: str) -> list[dict[str, str]]:
        """Run an action of SGLang's weight checker and return the answer of each process."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        request = CheckWeightsReqInput(action=action)
        success, message, ranks, _ = await self._call(lambda: self._tokenizer_manager.check_weights(request))
        if not success:
            raise UnavailableError(f"SGLang could not inspect its weights: {message}")
        return [rank["checksums"] for rank in ranks]

    async def set_version(self, version: int) -> None:
        """Stamp tokens with `version` from now on."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._call(lambda: self._tokenizer_manager.update_weight_version(request))
        self._engine.barrier.version = version
        self._is_proven = True

    def fail_running(self, reason: str) -> None:
        """End all running requests with an UnavailableError."""
        self._engine.fail_running(reason)

    async def _succeed(self, what: str, make: Callable[[], Coroutine[Any, Any, tuple[bool, str]]]) -> None:
        success, message = await self._call(make)
        if not success:
            raise UnavailableError(f"SGLang could not {what}: {message}")

    async def _call(self, make: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        while self._last is not None and not self._last.done():
            await asyncio.wait({self._last})
        task = asyncio.create_task(make())
        self._last = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_note_end)
            raise


def _note_end(task: "asyncio.Task[Any]") -> None:
    """Log the failure of a call whose caller has given up."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("sglang.late_failure", error=str(task.exception()))
