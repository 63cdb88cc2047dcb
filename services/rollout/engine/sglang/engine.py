"""One SGLang engine inside this process, on this process's event loop.

It takes only requests that `prompt.py` has checked. Cancelling a call aborts its request inside SGLang. If one of
SGLang's own processes dies or hangs, `died` is set: the engine is unusable, and this process should end.
"""

import asyncio
import dataclasses
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from fastapi import HTTPException

from penstock.config import NetworkConfig
from penstock.errors import InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.model.families.experts import mixture_shape
from penstock.model.tokens import forbidden_token_ids
from penstock.v1 import generate_pb2
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.pd_barrier import PdBarrier
from services.rollout.engine.prompt import CheckedRequest, PromptChecker
from services.rollout.engine.sglang import loading, settings
from services.rollout.engine.sglang.generation import Generation, read_generation, require_sound
from services.rollout.engine.sglang.scheduler_watch import silence_limit_s, until_it_hangs
from services.rollout.engine.sglang.token_stream import TokenStream

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

FORBIDDEN_BIAS = -1e4
"""Added to the logits of ids that may never be sampled: their probability is exactly 0 in float32."""

MAX_STREAM_INTERVAL = 4
"""Maximum tokens that SGLang collects before it reports them, for callers who take large chunks. Each report costs the
event loop 0.1 ms; unreported tokens are lost if SGLang dies."""


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
    """SGLang's request."""
    bootstrap: generate_pb2.Bootstrap | None
    task: asyncio.Task[Any] | None = None
    failure: PenstockError | None = None
    is_aborted: bool = False
    version: int | None = None
    """On a PD pair: the policy version of the whole call."""

    @property
    def hint(self) -> str:
        """Return the remedy, for the error when SGLang ends the call."""
        if self.bootstrap is None:
            return ""
        return "; its peer is late or gone: send it to another pair"

    def stamped(self, part: Generation) -> Generation:
        """Return `part`; on a PD pair with our own version span, because SGLang's are unreliable there."""
        if self.version is None:
            return part
        return dataclasses.replace(part, version_spans=[(len(part.output_ids), self.version)])


class SglangEngine:
    """Generates tokens. Create it with `start` and use it only from that event loop."""

    def __init__(self, engine: Any, config: RolloutConfig, model_path: Path) -> None:
        """Wrap a running `sglang.Engine`."""
        self._engine = engine
        self._tokenizer_manager = engine.tokenizer_manager
        self._logit_bias = {str(token): FORBIDDEN_BIAS for token in forbidden_token_ids(model_path)}
        self._running: dict[str, _Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.died = asyncio.Event()
        self.death = ""
        """Why it died; empty while it lives."""
        self.barrier = PdBarrier()
        self.is_disaggregated = disaggregation.is_disaggregated(config)
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        context = settings.context_length(config, model_path)
        # SGLang reserves a few tokens of the context.
        max_tokens = min(context - 1, int(scheduler["max_total_num_tokens"]) - 1, int(scheduler["max_req_input_len"]))
        self.mixture = mixture_shape(model_path)
        """Shape of the model's mixture of experts; None for a dense model."""
        self.checker = PromptChecker(
            model_path,
            max_tokens=max_tokens,
            disaggregated=self.is_disaggregated,
            records_experts=engine.server_args.enable_return_routed_experts and not self.is_disaggregated,
        )

    @classmethod
    async def start(
        cls,
        config: RolloutConfig,
        model_path: Path,
        *,
        network: NetworkConfig,
        float32_head: bool,
        group_timeout_s: float,
        router_replay: bool = False,
        enable_metrics: bool = False,
    ) -> "SglangEngine":
        """Load the model and answer a first request. Blocks the event loop while it loads, 10 to 60 s.

        Call it in the main thread, before gRPC is used: on a CPU it forks.

        Raises:
            SetupError: SGLang did not start.
        """
        started = time.monotonic()
        raw = loading.load(
            config,
            model_path,
            network=network,
            float32_head=float32_head,
            group_timeout_s=group_timeout_s,
            router_replay=router_replay,
            enable_metrics=enable_metrics,
        )
        engine = cls(raw, config, model_path)
        engine._watch()
        if config.role == "prefill":
            await asyncio.to_thread(disaggregation.require_registered, network.host, engine.bootstrap_port)
        await engine.check_health(timeout_s=120.0)
        log.info(
            "engine.started",
            load_s=round(time.monotonic() - started, 1),
            device=raw.server_args.device,
            dtype=raw.server_args.dtype,
        )
        return engine

    @property
    def tokenizer_manager(self) -> Any:
        """SGLang's tokenizer manager, whose coroutines control the engine."""
        return self._tokenizer_manager

    @property
    def bootstrap_port(self) -> int:
        """The port of a prefill engine's bootstrap server, where decode engines ask for its KV cache."""
        return int(self._engine.server_args.disaggregation_bootstrap_port)

    @property
    def num_in_flight(self) -> int:
        """The number of `generate` and `stream` calls in flight."""
        return len(self._running)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    async def generate(self, checked: CheckedRequest) -> Generation:
        """Play one turn.

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; its tokens are lost.
            NotReadyError: its PD pair was chosen for another policy version, or the engine hands it over.
        """
        call = _Call(self._request(checked), checked.bootstrap)
        with self._in_flight(call, self._collect(call)) as task:
            return call.stamped(await task)

    async def stream(self, checked: CheckedRequest, *, chunk_tokens: int) -> AsyncGenerator[Generation, None]:
        """Play one turn and yield its tokens, each once, in parts of at least `chunk_tokens` (see `TokenStream`).

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: the engine became unusable while it ran; all tokens that SGLang reported were yielded.
            NotReadyError: its PD pair was chosen for another policy version, or the engine hands it over.
        """
        request = self._request(checked, stream_interval=max(1, min(MAX_STREAM_INTERVAL, chunk_tokens // 4)))
        tokens = TokenStream(min_tokens=chunk_tokens)
        call = _Call(request, checked.bootstrap)
        with self._in_flight(call, self._pump(call, tokens)) as task:
            task.add_done_callback(lambda _: tokens.close())  # even if it is cancelled before its first step
            while (part := await tokens.take()) is not None:
                yield call.stamped(part)
            await task

    def fail_running(self, reason: str) -> None:
        """End all running calls with an UnavailableError of text `reason`, and abort their requests in SGLang."""
        self._end_running(UnavailableError, reason)

    def hand_over(self, reason: str) -> None:
        """The same with a NotReadyError: others play the rest, and nothing has failed."""
        self._end_running(NotReadyError, reason)

    def _end_running(self, kind: type[PenstockError], reason: str) -> None:
        for call in self._running.values():
            # A caller that still takes the finished tokens is to hear what ended its call, not what came after.
            call.failure = call.failure or kind(reason)
            if call.task is not None:
                call.task.cancel()
            self._abort(call)  # now, because callers may be slow to take the finished tokens

    async def check_health(self, *, timeout_s: float) -> None:
        """Generate one token.

        Raises:
            UnavailableError: no token arrived within `timeout_s` seconds.
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
        """Return SGLang's load as last reported."""
        loads = await self._tokenizer_manager.get_loads()
        return Load(
            num_running=sum(load.num_running_reqs for load in loads),
            num_queued=sum(load.num_waiting_reqs for load in loads),
            kv_use=max((load.token_usage for load in loads), default=0.0),
        )

    async def until_it_hangs(self, *, is_excused: Callable[[], bool]) -> None:
        """Return when SGLang's scheduler hangs, which ends the engine; it does not while `is_excused`."""
        limit_s = silence_limit_s(self._engine.server_args.watchdog_timeout)
        ask = self._tokenizer_manager.get_internal_state
        await until_it_hangs(ask, limit_s=limit_s, is_excused=is_excused)
        self._die(f"SGLang's scheduler has answered nothing for {limit_s:g} s")

    def _die(self, reason: str) -> None:
        log.error(
            "engine.died",
            reason=reason,
            remedy="SGLang's log above says why; the process ends and should be started again",
        )
        self.death = reason
        self.died.set()
        self.fail_running("the engine died")

    async def shutdown(self) -> None:
        """End SGLang's processes and wait for their exit."""
        self.fail_running("the engine shuts down")
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGQUIT)
        tasks = [task for task in self._tokenizer_manager.asyncio_tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown)

    def _watch(self) -> None:
        """Replace SGLang's signal handlers, which are meant for its own server."""

        engine = self

        class Signals:
            def __init__(self, _tokenizer_manager: Any) -> None:
                pass

            def sigterm_handler(self) -> None:
                # SGLang takes over SIGTERM but not SIGINT, which means the same here.
                signal.raise_signal(signal.SIGINT)

            def running_phase_sigquit_handler(self) -> None:
                engine._die("one of SGLang's processes ended")

        self._tokenizer_manager.signal_handler_class = Signals
        self._tokenizer_manager.auto_create_handle_loop()

    def _request(self, checked: CheckedRequest, *, stream_interval: int = 0) -> Any:
        """Build SGLang's request. It reports every `stream_interval` new tokens; 0: once, at the end."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=uuid.uuid4().hex,  # SGLang aborts every id with a given prefix, so callers' ids are unsafe
            input_ids=checked.input_ids,
            image_data=list(checked.images) or None,
            sampling_params={
                "temperature": checked.temperature,
                "top_p": checked.top_p,
                "top_k": checked.top_k or -1,
                "max_new_tokens": checked.max_new_tokens,
                "stop_token_ids": checked.stop_token_ids,
                "ignore_eos": checked.ignore_end,
                "logit_bias": self._logit_bias or None,
                "stream_interval": stream_interval or None,
                **checked.constraint,
            },
            return_logprob=True,
            logprob_start_len=0 if checked.prompt_logprobs else -1,
            top_logprobs_num=checked.num_top_logprobs,
            return_routed_experts=checked.routed_experts_from is not None,
            routed_experts_start_len=checked.routed_experts_from or 0,
            stream=stream_interval > 0,
            **disaggregation.request_args(checked.bootstrap),
        )

    @contextmanager
    def _in_flight(self, call: _Call, work: Coroutine[Any, Any, ResultT]) -> "Iterator[asyncio.Task[ResultT]]":
        """Run `work` as a task that `_end_running` ends; at the end of the context, abort the request in SGLang."""
        task = asyncio.create_task(work)
        task.add_done_callback(_retrieve)
        call.task = task
        request_id = call.request.rid
        self._running[request_id] = call
        self._idle.clear()
        try:
            yield task
        except asyncio.CancelledError:
            if call.failure is not None:
                raise call.failure from None
            raise
        except ValueError as error:
            raise InvalidRequestError(f"SGLang refuses the request: {error}") from None
        except HTTPException as error:  # SGLang's own failure of a request that is not streamed
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
        """Abort the request in SGLang, once."""
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
    """Retrieve the task's error, because asyncio warns of errors that no caller retrieved."""
    if not task.cancelled():
        task.exception()
