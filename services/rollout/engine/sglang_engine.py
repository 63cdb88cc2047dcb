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

from penstock.errors import InvalidRequestError, SetupError, UnavailableError
from penstock.tokens import forbidden_token_ids
from services.rollout.engine import settings
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.generation import Generation, read_generation, require_sound
from services.rollout.engine.prompt import PromptChecker, Turn
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
class _Running:
    task: asyncio.Task[Any]
    failure: str = ""


class SglangEngine:
    """Generates tokens. Use `start`; afterwards only from the same event loop."""

    def __init__(self, engine: Any, config: RolloutConfig, model_path: Path) -> None:
        """Wrap a running `sglang.Engine`."""
        self._engine = engine
        self._tokenizer_manager = engine.tokenizer_manager
        self._logit_bias = {str(token): FORBIDDEN_BIAS for token in forbidden_token_ids(model_path)}
        self._running: dict[str, _Running] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.died = asyncio.Event()
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        context = settings.context_length(config, model_path)
        # SGLang keeps a few tokens of the context for itself.
        max_tokens = min(context - 1, int(scheduler["max_total_num_tokens"]) - 1, int(scheduler["max_req_input_len"]))
        self.checker = PromptChecker(model_path, max_tokens=max_tokens)

    @classmethod
    async def start(cls, config: RolloutConfig, model_path: Path) -> "SglangEngine":
        """Load the model and answer a first request. Blocks the event loop for the 10 to 60 s that loading takes.

        Call it in the main thread and before gRPC is used: on a CPU it forks.

        Raises:
            SetupError: SGLang did not come up.
        """
        started = time.monotonic()
        cuda = settings.has_cuda()
        os.environ.update(settings.environment(config, cuda=cuda))
        # A million objects that live for ever: looking through them takes seconds, while starting and again at the end.
        gc.disable()
        with warnings.catch_warnings(action="ignore"):  # which kernels a machine without a GPU lacks
            from sglang.srt.entrypoints.engine import Engine

        gc.freeze()
        gc.enable()
        imported = time.monotonic()
        try:
            raw = Engine(**settings.server_args(config, model_path, cuda=cuda))
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise SetupError(
                f"SGLang did not start with model {model_path}: {error}; its own log above says more"
            ) from error
        engine = cls(raw, config, model_path)
        engine._watch()
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
    def num_in_flight(self) -> int:
        """Calls of `generate` and `stream` that have not ended."""
        return len(self._running)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    async def generate(self, turn: Turn) -> Generation:
        """Play one turn.

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; its tokens are lost.
        """
        request = self._request(turn)
        with self._in_flight(request.rid, self._collect(request)) as task:
            return await task

    async def stream(self, turn: Turn, *, chunk_tokens: int) -> AsyncGenerator[Generation, None]:
        """Play one turn and yield its tokens, each once, in parts of at least `chunk_tokens` (see `TokenStream`).

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; all tokens that SGLang told of were yielded.
        """
        request = self._request(turn, stream_interval=max(1, min(MAX_STREAM_INTERVAL, chunk_tokens // 4)))
        tokens = TokenStream(min_tokens=chunk_tokens)
        with self._in_flight(request.rid, self._pump(request, tokens)) as task:
            task.add_done_callback(lambda _: tokens.close())  # also of one that was cancelled before its first step
            while (part := await tokens.take()) is not None:
                yield part
            await task

    def fail_running(self, reason: str) -> None:
        """End all running calls with an UnavailableError that says `reason`."""
        for running in self._running.values():
            running.failure = reason
            running.task.cancel()

    async def check_health(self, *, timeout_s: float) -> None:
        """Generate one token.

        Raises:
            UnavailableError: it did not come within `timeout_s`.
        """
        turn = Turn(input_ids=[0], images=[], temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, stop_token_ids=[])
        try:
            async with asyncio.timeout(timeout_s):
                await self.generate(turn)
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

    def _request(self, turn: Turn, *, stream_interval: int = 0) -> Any:
        """`stream_interval`: SGLang tells of every so many tokens; 0: only of all of them, at the end."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=uuid.uuid4().hex,  # SGLang aborts by prefix of the id, so callers' own ids would not do
            input_ids=turn.input_ids,
            image_data=list(turn.images) or None,
            sampling_params={
                "temperature": turn.temperature,
                "top_p": turn.top_p,
                "top_k": turn.top_k or -1,
                "max_new_tokens": turn.max_new_tokens,
                "stop_token_ids": turn.stop_token_ids,
                "logit_bias": self._logit_bias or None,
                "stream_interval": stream_interval or None,
            },
            return_logprob=True,
            stream=stream_interval > 0,
        )

    @contextmanager
    def _in_flight(self, request_id: str, work: Coroutine[Any, Any, ResultT]) -> "Iterator[asyncio.Task[ResultT]]":
        """Run `work` as a task that `fail_running` ends; on leaving, whatever is left of the request is aborted."""
        running = _Running(asyncio.create_task(work))
        running.task.add_done_callback(_retrieve)
        self._running[request_id] = running
        self._idle.clear()
        try:
            yield running.task
        except asyncio.CancelledError:
            if running.failure:
                raise UnavailableError(running.failure) from None
            raise
        except ValueError as error:
            raise InvalidRequestError(f"SGLang refuses the request: {error}") from None
        except HTTPException as error:  # so SGLang says of a unary request that the fault is its own
            raise UnavailableError(f"SGLang ended the request: {error.detail}") from None
        finally:
            del self._running[request_id]
            if not self._running:
                self._idle.set()
            running.task.cancel()
            self._tokenizer_manager.abort_request(rid=request_id)

    async def _collect(self, request: Any) -> Generation:
        last: dict[str, Any] = {}
        async with aclosing(self._tokenizer_manager.generate_request(request, None)) as responses:
            async for response in responses:
                last = response
        require_sound(last)
        return read_generation(last)

    async def _pump(self, request: Any, tokens: TokenStream) -> None:
        async with aclosing(self._tokenizer_manager.generate_request(request, None)) as responses:
            async for response in responses:
                tokens.put(response)


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Look at the task's error, which nobody may be waiting for any more."""
    if not task.cancelled():
        task.exception()
