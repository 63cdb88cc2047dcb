"""SGLang's side of a push: the calls that the receiver makes, in a form that cannot wedge SGLang.

SGLang answers such calls one at a time, and an answer that nobody waits for would be taken for the next call's. So a
call, once made, is always awaited to its end, even when whoever wanted it has given up; the next call waits for it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from penstock.errors import UnavailableError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import TensorSpec
from services.rollout.engine.parameter_names import load_name
from services.rollout.engine.sglang_engine import SglangEngine
from services.rollout.engine.sglang_variables import DIGEST_ACTION, HeldParameter, parse_parameter

log = structlog.get_logger()

_FLUSH_RETRY_S = 0.01

ResultT = TypeVar("ResultT")


class SglangWeights:
    """Implements `weights.WeightSink` with an engine."""

    def __init__(self, engine: SglangEngine) -> None:
        """Act on `engine`."""
        self._engine = engine
        self._tokenizer_manager = engine.tokenizer_manager
        self._architecture: str = self._tokenizer_manager.model_config.hf_config.architectures[0]
        self._last: asyncio.Task[Any] | None = None

    async def join_group(self, group: rollout_pb2.WeightGroup) -> None:
        """Join `group`; back when it has formed. SGLang generates nothing meanwhile."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=group.master_host,
            master_port=group.master_port,
            rank_offset=group.rank_offset,
            world_size=group.world_size,
            group_name=group.name,
            backend=group.backend,
        )
        await self._succeed("join the group", lambda: self._tokenizer_manager.init_weights_update_group(request))

    async def leave_group(self, name: str) -> None:
        """Leave the group; no error if it is gone already."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        success, message = await self._call(lambda: self._tokenizer_manager.destroy_weights_update_group(request))
        if not success:
            log.debug("weight_group.leave_failed", group=name, reason=message)

    async def pause(self) -> None:
        """Stop at a token boundary, hand the running requests back to the queue, and forget all that was computed."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._call(lambda: self._tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract")))
        # Refused while a request has just ended and its batch is not yet cleared away.
        while not (await self._call(self._tokenizer_manager.flush_cache)).success:  # noqa: ASYNC110 - SGLang has no event
            await asyncio.sleep(_FLUSH_RETRY_S)

    async def resume(self) -> None:
        """Go on; requests that were handed back compute their prefix anew, with the weights of now."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        await self._call(lambda: self._tokenizer_manager.continue_generation(request))

    async def begin(self) -> None:
        """Open an update; closes one that was left open."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await self.end_if_open()
        await self._succeed(
            "begin the update", lambda: self._tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput())
        )

    async def take_bucket(self, bucket: Sequence[TensorSpec], *, group_name: str) -> None:
        """Receive one bucket from rank 0 of the group and load it."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        request = UpdateWeightsFromDistributedReqInput(
            names=[load_name(spec.name, self._architecture) for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[list(spec.shape) for spec in bucket],
            group_name=group_name,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        await self._succeed("take a bucket", lambda: self._tokenizer_manager.update_weights_from_distributed(request))

    async def end(self) -> None:
        """Close the update: what is derived from weights is computed anew."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._succeed(
            "end the update", lambda: self._tokenizer_manager.end_weight_update(EndWeightUpdateReqInput())
        )

    async def end_if_open(self) -> None:
        """Close an update that was left open by a push that failed."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._call(lambda: self._tokenizer_manager.end_weight_update(EndWeightUpdateReqInput()))

    async def parameters(self) -> dict[str, HeldParameter]:
        """What the engine holds, by checkpoint name. Reads every byte."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        request = CheckWeightsReqInput(action=DIGEST_ACTION)
        success, message, ranks, _ = await self._call(lambda: self._tokenizer_manager.check_weights(request))
        if not success:
            raise UnavailableError(f"SGLang could not compute digests: {message}")
        return {name: parse_parameter(text) for rank in ranks for name, text in rank["checksums"].items()}

    async def set_version(self, version: int) -> None:
        """Stamp tokens with `version` from now on."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._call(lambda: self._tokenizer_manager.update_weight_version(request))

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
    """Take note of how a call ended that nobody waits for any more."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("sglang.late_failure", error=str(task.exception()))
