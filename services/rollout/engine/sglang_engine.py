"""One SGLang engine inside this process, on this process's event loop.

What is submitted was checked before (`prompt.py`). A call that is cancelled is aborted inside SGLang. If one of
SGLang's own processes dies, `died` is set: the engine is of no use any more, and the process should end.
"""

import asyncio
import dataclasses
import gc
import os
import signal
import time
import uuid
import warnings
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from fastapi import HTTPException

from penstock.config import NetworkConfig
from penstock.errors import InvalidRequestError, SetupError, UnavailableError
from penstock.model.tokens import forbidden_token_ids
from penstock.v1 import generate_pb2
from services.rollout.engine import disaggregation, settings
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.generation import Generation, read_generation, require_sound
from services.rollout.engine.pd_barrier import PdBarrier
from services.rollout.engine.prompt import CheckedRequest, PromptChecker
from services.rollout.engine.token_stream import TokenStream

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

FORBIDDEN_BIAS = -1e4
"""Added to the logits of ids that may never be sampled: their probability is exactly 0 in float32."""

MAX_STREAM_INTERVAL = 4
"""To tell of a token costs the event loop a tenth of a millisecond. SGLang keeps fewer than so many to itself where a
caller wants many at a time anyway; they are lost with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the engine is."""

    num_running: int
    num_queued: int
    kv_use: float
    """Share of the KV cache in use, 0 to 1."""


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of `generate` or `stream` that has not ended."""

    request: Any
    """What SGLang is asked."""
    bootstrap: generate_pb2.Bootstrap | None
    task: asyncio.Task[Any] | None = None
    failure: str = ""
    is_aborted: bool = False
    version: int | None = None
    """On a PD pair: the version under which it began, and under which it will end."""

    @property
    def hint(self) -> str:
        """What to do when SGLang ends it."""
        if self.bootstrap is None:
            return ""
        return "; its peer is late or gone, play it with another pair"

    def stamped(self, part: Generation) -> Generation:
        """`part` with a span of our own, where SGLang's cannot be relied on."""
        if self.version is None:
            return part
        return dataclasses.replace(part, version_spans=[(len(part.output_ids), self.version)])


class SglangEngine:
    """Generates tokens. Use `start`; afterwards only from the same event loop."""

    def __init__(self, engine: Any, config: RolloutConfig, model_path: Path) -> None:
        """Wrap a running `sglang.Engine`."""
        self._engine = engine
        self._tokenizer_manager = engine.tokenizer_manager
        self._logit_bias = {str(token): FORBIDDEN_BIAS for token in forbidden_token_ids(model_path)}
        self._running: dict[str, _Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.died = asyncio.Event()
        self.barrier = PdBarrier()
        self.is_disaggregated = disaggregation.is_disaggregated(config)
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        context = settings.context_length(config, model_path)
        # SGLang keeps a few tokens of the context for itself.
        max_tokens = min(context - 1, int(scheduler["max_total_num_tokens"]) - 1, int(scheduler["max_req_input_len"]))
        self.checker = PromptChecker(model_path, max_tokens=max_tokens, disaggregated=self.is_disaggregated)

    @classmethod
    async def start(cls, config: RolloutConfig, model_path: Path, *, network: NetworkConfig) -> "SglangEngine":
        """Load the model and answer a first request. Blocks the event loop for the 10 to 60 s that loading takes.

        Call it in the main thread and before gRPC is used: on a CPU it forks.

        Raises:
            SetupError: SGLang did not come up.
        """
        started = time.monotonic()
        cuda = settings.has_cuda()
        os.environ.update(settings.environment(config, network, cuda=cuda))
        disaggregation.require_transfer_backend(config, cuda=cuda)
        # A million objects that live for ever: looking through them takes seconds, while starting and again at the end.
        gc.disable()
        with warnings.catch_warnings(action="ignore"):  # which kernels a machine without a GPU lacks
            from sglang.srt.entrypoints.engine import Engine

        gc.freeze()
        gc.enable()
        imported = time.monotonic()
        try:
            raw = Engine(**settings.server_args(config, network, model_path, cuda=cuda))
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise SetupError(
                f"SGLang did not start with model {model_path}: {error}; its own log above says more"
            ) from error
        engine = cls(raw, config, model_path)
        engine._watch()
        if config.role == "prefill":
            await asyncio.to_thread(disaggregation.require_registered, network.host, engine.bootstrap_port)
        await engine.check_health(timeout_s=120.0)
        log.info(
            "engine.started",
            import_s=round(imported - started, 1),
            load_s=round(time.monotonic() - imported, 1),
            device="cuda" if cuda else "cpu",
            dtype=raw.server_args.dtype,
        )
        return engine

    @property
    def tokenizer_manager(self) -> Any:
        """SGLang's tokenizer manager, whose coroutines control the engine."""
        return self._tokenizer_manager

    @property
    def bootstrap_port(self) -> int:
        """Where a prefill engine tells decode engines of its KV cache."""
        return int(self._engine.server_args.disaggregation_bootstrap_port)

    @property
    def num_in_flight(self) -> int:
        """Calls of `generate` and `stream` that have not ended."""
        return len(self._running)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    async def generate(self, checked: CheckedRequest) -> Generation:
        """Play one checked.

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; its tokens are lost.
            NotReadyError: its PD pair was chosen for another policy version.
        """
        call = _Call(self._request(checked), checked.bootstrap)
        with self._in_flight(call, self._collect(call)) as task:
            return call.stamped(await task)

    async def stream(self, checked: CheckedRequest, *, chunk_tokens: int) -> AsyncGenerator[Generation, None]:
        """Play one turn and yield its tokens, each once, in parts of at least `chunk_tokens` (see `TokenStream`).

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; all tokens that SGLang told of were yielded.
            NotReadyError: its PD pair was chosen for another policy version.
        """
        request = self._request(checked, stream_interval=max(1, min(MAX_STREAM_INTERVAL, chunk_tokens // 4)))
        tokens = TokenStream(min_tokens=chunk_tokens)
        call = _Call(request, checked.bootstrap)
        with self._in_flight(call, self._pump(call, tokens)) as task:
            task.add_done_callback(lambda _: tokens.close())  # also of one that was cancelled before its first step
            while (part := await tokens.take()) is not None:
                yield call.stamped(part)
            await task

    def fail_running(self, reason: str) -> None:
        """End all running calls with an UnavailableError that says `reason`; SGLang ends its part at once."""
        for call in self._running.values():
            call.failure = reason
            if call.task is not None:
                call.task.cancel()
            self._abort(call)  # at once: callers may be slow to take what there is

    async def check_health(self, *, timeout_s: float) -> None:
        """Generate one token.

        Raises:
            UnavailableError: it did not come within `timeout_s`.
        """
        checked = CheckedRequest(
            input_ids=[0], images=[], temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, stop_token_ids=[],
            bootstrap=disaggregation.alone(self.barrier.version) if self.is_disaggregated else None,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_s):
                call = _Call(self._request(checked), checked.bootstrap)
                with self._in_flight(call, self._answer(call)) as task:
                    await task
        except TimeoutError:
            raise UnavailableError(f"the engine produced no token within {timeout_s} s") from None

    async def load(self) -> Load:
        """How busy SGLang is, as it said last."""
        snapshots = await self._tokenizer_manager.get_loads()
        return Load(
            num_running=sum(snapshot.num_running_reqs for snapshot in snapshots),
            num_queued=sum(snapshot.num_waiting_reqs for snapshot in snapshots),
            kv_use=max((snapshot.token_usage for snapshot in snapshots), default=0.0),
        )

    async def shutdown(self) -> None:
        """End SGLang's processes and wait until they are gone."""
        self.fail_running("the engine shuts down")
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGQUIT)
        tasks = [task for task in self._tokenizer_manager.asyncio_tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown)

    def _watch(self) -> None:
        """Have SGLang's signal handlers do what this process needs, not what SGLang's own server does."""

        engine = self

        class Signals:
            def __init__(self, _tokenizer_manager: Any) -> None:
                pass

            def sigterm_handler(self) -> None:
                # SGLang takes SIGTERM away from the process; SIGINT means the same here and is still its own.
                signal.raise_signal(signal.SIGINT)

            def running_phase_sigquit_handler(self) -> None:
                log.error(
                    "engine.died", remedy="SGLang's log above says why; the process ends and should be started again"
                )
                engine.died.set()
                engine.fail_running("the engine died")

        self._tokenizer_manager.signal_handler_class = Signals
        self._tokenizer_manager.auto_create_handle_loop()

    def _request(self, checked: CheckedRequest, *, stream_interval: int = 0) -> Any:
        """`stream_interval`: SGLang tells of every so many tokens; 0: only of all of them, at the end."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=uuid.uuid4().hex,  # SGLang aborts by prefix of the id, so callers' own ids would not do
            input_ids=checked.input_ids,
            image_data=list(checked.images) or None,
            sampling_params={
                "temperature": checked.temperature,
                "top_p": checked.top_p,
                "top_k": checked.top_k or -1,
                "max_new_tokens": checked.max_new_tokens,
                "stop_token_ids": checked.stop_token_ids,
                "logit_bias": self._logit_bias or None,
                "stream_interval": stream_interval or None,
            },
            return_logprob=True,
            stream=stream_interval > 0,
            **disaggregation.request_args(checked.bootstrap),
        )

    @contextmanager
    def _in_flight(self, call: _Call, work: Coroutine[Any, Any, ResultT]) -> "Iterator[asyncio.Task[ResultT]]":
        """Run `work` as a task that `fail_running` ends; on leaving, whatever is left of the request is aborted."""
        task = asyncio.create_task(work)
        task.add_done_callback(_retrieve)
        call.task = task
        request_id = call.request.rid
        self._running[request_id] = call
        self._idle.clear()
        try:
            yield task
        except asyncio.CancelledError:
            if call.failure:
                raise UnavailableError(call.failure) from None
            raise
        except ValueError as error:
            raise InvalidRequestError(f"SGLang refuses the request: {error}") from None
        except HTTPException as error:  # so SGLang says of a unary request that the fault is its own
            raise UnavailableError(f"SGLang ended the request: {error.detail}{call.hint}") from None
        except UnavailableError as error:
            raise UnavailableError(f"{error}{call.hint}") from None
        finally:
            del self._running[request_id]
            if not self._running:
                self._idle.set()
            task.cancel()
            self._abort(call)

    def _abort(self, call: _Call) -> None:
        """Have SGLang forget the request, once."""
        if not call.is_aborted:
            call.is_aborted = True
            self._tokenizer_manager.abort_request(rid=call.request.rid)

    async def _collect(self, call: _Call) -> Generation:
        return read_generation(await self._answer(call))

    async def _answer(self, call: _Call) -> dict[str, Any]:
        await self._pass_barrier(call)
        last: dict[str, Any] = {}
        async with aclosing(self._tokenizer_manager.generate_request(call.request, None)) as responses:
            async for response in responses:
                last = response
        require_sound(last)
        return last

    async def _pump(self, call: _Call, tokens: TokenStream) -> None:
        await self._pass_barrier(call)
        async with aclosing(self._tokenizer_manager.generate_request(call.request, None)) as responses:
            async for response in responses:
                tokens.put(response)

    async def _pass_barrier(self, call: _Call) -> None:
        if call.bootstrap is not None:
            call.version = await self.barrier.passed(call.bootstrap)


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Look at the task's error, which nobody may be waiting for any more."""
    if not task.cancelled():
        task.exception()
