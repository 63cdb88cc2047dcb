"""Penstock's changes to SGLang, through SGLang's own plugin hooks; nothing is patched.

SGLang calls `register` in each of its processes (entry-point group `sglang.srt.plugins`), even if Penstock did not
start it, so each hook must leave a plain SGLang unchanged.
"""

import datetime
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from penstock.weights import nccl
from services.rollout.engine.sglang_plugin import (
    cpu_attention,
    cpu_experts,
    grammar,
    image_processors,
    metric_files,
    pd_hooks,
    tensor_pickling,
    version_keys,
)
from services.rollout.engine.sglang_plugin.linear_attention import hooks as linear_attention
from services.rollout.engine.sglang_plugin.variables import (
    DIGEST_ACTION,
    GROUP_TIMEOUT_VARIABLE,
    LINEAR_ATTENTION_VARIABLE,
    PARAMETERS_ACTION,
    START_METHOD_VARIABLE,
    parse_name_to_join,
)

_log = logging.getLogger(__name__)
"""SGLang's processes log in its own way."""

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_EXPERTS = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
_PROCESSORS = "sglang.srt.managers.multimodal_processor"
_LOAD_PROCESSOR = "sglang.srt.utils.hf_transformers.processor.get_processor"
_REGISTER_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_ACCUMULATOR = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"


def register() -> None:
    """Register the hooks."""
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _check_weights, HookType.AROUND)
    HookRegistry.register(_UPDATER + ".receive_weights_from_distributed", _receive_weights, HookType.AROUND)
    if os.environ.get(START_METHOD_VARIABLE):
        tensor_pickling.register()
        metric_files.register()
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _set_start_method, HookType.AFTER)
        HookRegistry.register("sglang.srt.utils.common.kill_itself_when_parent_died", _detach_signals, HookType.AFTER)
        HookRegistry.register(_ATTENTION + ".init_forward_metadata", cpu_attention.plan, HookType.AFTER)
        HookRegistry.register(_ATTENTION + "._run_sdpa_forward_decode", cpu_attention.decode, HookType.AROUND)
        HookRegistry.register(_ATTENTION + "._run_sdpa_forward_extend", cpu_attention.extend, HookType.AROUND)
        HookRegistry.register(_EXPERTS + ".forward_native", cpu_experts.compute_own, HookType.AROUND)
        HookRegistry.register(_PROCESSORS + ".import_processors", image_processors.import_some, HookType.AROUND)
        HookRegistry.register(_PROCESSORS + ".get_mm_processor_cls", image_processors.import_others, HookType.BEFORE)
        HookRegistry.register(_LOAD_PROCESSOR, image_processors.keep_bounds, HookType.BEFORE)
        HookRegistry.register(_REGISTER_HOST_MEMORY, _register_host_memory, HookType.AROUND)
        HookRegistry.register(_ACCUMULATOR + ".accept", _add_version_spans, HookType.AFTER)
        HookRegistry.register(_SCHEDULER + "._add_request_to_queue", version_keys.key_by_version, HookType.BEFORE)
        HookRegistry.register(_SCHEDULER + ".record_weight_version_change", version_keys.note_version, HookType.AROUND)
        HookRegistry.register(_GRAMMARS + ".process_req_with_grammar", grammar.prepare_backend, HookType.BEFORE)
        HookRegistry.register(_SCHEDULER + ".pause_generation", version_keys.pause, HookType.AROUND)
        HookRegistry.register(
            _SCHEDULER + "._record_scheduler_state_for_paused_engine", _wait_while_paused, HookType.AFTER
        )
        if os.environ.get(LINEAR_ATTENTION_VARIABLE):
            linear_attention.register()
    pd_hooks.register()
    if os.environ.get(GROUP_TIMEOUT_VARIABLE):
        HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", _bound_group, HookType.BEFORE)
        HookRegistry.register(_UPDATER + ".init_weights_update_group", _join_group, HookType.AROUND)


def _set_start_method(_result: None, *_args: Any, **_kwargs: Any) -> None:
    method = os.environ[START_METHOD_VARIABLE]
    multiprocessing.set_start_method(method, force=True)
    if threading.current_thread() is threading.main_thread():
        # A child that dies during SGLang's start closes its pipe, which is reported as an error. SGLang's own handler
        # would kill this process before the report.
        signal.signal(signal.SIGQUIT, _note_signal)


def _note_signal(_number: int, _frame: object) -> None:
    """Ignore the signal. Children do not inherit this, unlike SIG_IGN."""


def _detach_signals(_result: None) -> None:
    """Detach a child from signals: those of a terminal reach the whole OS process group, but children must outlive the
    drain."""
    signal.set_wakeup_fd(-1)  # after a fork it is still the parent's event loop
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _join_group(
    join: Callable[..., tuple[bool, str]],
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
) -> tuple[bool, str]:
    """Refuse a group whose trainer has given up while SGLang computed: it would wait for minutes, and the engine with
    it, for members that do not come."""
    name, before = parse_name_to_join(group_name)
    if time.monotonic() >= before:
        reason = f"SGLang came to process group {name} too late; its trainer no longer waits"
        _log.error(reason)  # whoever asked has given up, too; SGLang writes errors only
        return False, reason
    return join(updater, master_address, master_port, rank_offset, world_size, name, backend)


def _bound_group(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    timeout = datetime.timedelta(seconds=float(os.environ[GROUP_TIMEOUT_VARIABLE]))
    options = nccl.group_options(kwargs.get("backend", ""), timeout)
    return args, {**kwargs, "timeout": timeout, **({} if options is None else {"pg_options": options})}


def _check_weights(handle: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    if action != PARAMETERS_ACTION and not action.startswith(DIGEST_ACTION):
        return handle(checker, action, *args, **kwargs)
    from services.rollout.engine.sglang_plugin.parameters import described_parameters

    model = checker._get_model()
    return {
        "checksums": described_parameters(model)
        if action == PARAMETERS_ACTION
        else _digests(model, action.removeprefix(DIGEST_ACTION)),
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=kwargs["role"]).model_dump(),
    }


def _digests(model: Any, kind: str) -> dict[str, str]:
    from services.rollout.engine.sglang_plugin.digests import digests_of
    from services.rollout.engine.sglang_plugin.merged_adapters import adapters_in

    adapters = adapters_in(model)
    if adapters is None:
        return digests_of(model, kind)
    return {name: str(digest) for name, digest in adapters.digests(kind).items()}


def _receive_weights(receive: Callable[..., Any], updater: Any, **request: Any) -> Any:
    from services.rollout.engine.sglang_plugin.weight_loader import load

    return load(receive, updater, **request)


def _register_host_memory(register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Register memory for copies to a GPU, if there is one: SGLang does so for the experts that it records."""
    if torch.cuda.is_available():
        register(*args, **kwargs)


def _wait_while_paused(_result: None, scheduler: Any) -> None:
    """Queue requests whose grammar is compiled, else sleep: SGLang's paused loop does neither.

    A request that awaits its grammar would keep the caches from being flushed, and a spinning loop would take a core
    from sending or loading weights. Sleep needs `sleep_on_idle` (`settings.py`). Messages that end a pause arrive at
    the sockets on which it sleeps.
    """
    if scheduler.grammar_manager.has_waiting_grammars():
        grammar.queue_compiled(scheduler)
    else:
        scheduler.maybe_sleep_on_idle()


def _add_version_spans(_result: None, accumulator: Any, *, req: Any) -> None:
    """Report with every token which weights made it, because streams need it; SGLang reports it only at the end."""
    if not accumulator.output_reqs or accumulator.output_reqs[-1] is not req:
        return  # nothing to report
    if req.stream and accumulator.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        accumulator.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=accumulator.completion_tokens[-1],
        )
