"""Hooks for PD pairs: SGLang's transfer back ends expect KV on GPUs, and peers that start in time."""

import os
import socket
import time
import urllib.parse
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.rollout.engine.sglang_plugin.variables import HOST_TRANSFER_VARIABLE, PAIR_DEADLINE_VARIABLE

_DISAGGREGATION = "sglang.srt.disaggregation"
_START_S = 240.0
_POLL_S = 0.1
_MOST_WAIT_US = 100_000
"""Longest wait of nixl's thread for an event, in microseconds, before it looks again."""


def register() -> None:
    """Register the hooks that this process needs."""
    if os.environ.get(PAIR_DEADLINE_VARIABLE):
        HookRegistry.register(f"{_DISAGGREGATION}.decode.DecodePreallocQueue.__init__", _bound_search, HookType.AFTER)
        HookRegistry.register(
            f"{_DISAGGREGATION}.common.conn.CommonKVManager._register_topology_row", _await_server, HookType.BEFORE
        )
    match os.environ.get(HOST_TRANSFER_VARIABLE):
        case "mooncake":
            HookRegistry.register(
                f"{_DISAGGREGATION}.mooncake.conn.MooncakeKVManager.__init__", _keep_indices_off_gpus, HookType.BEFORE
            )
        case "nixl":
            HookRegistry.register("nixl._api.nixl_agent.__init__", _take_host_memory, HookType.AFTER)
            HookRegistry.register("nixl._bindings.nixlAgent.__init__", _wait_for_events, HookType.BEFORE)


def _bound_search(_result: None, queue: Any, *_args: Any, **_kwargs: Any) -> None:
    """Limit a decode engine's attempts to find a missing prefill engine; it makes one per second."""
    queue._max_ensure_retries = int(os.environ[PAIR_DEADLINE_VARIABLE])


def _await_server(_manager: Any, url: str, *_args: Any, **_kwargs: Any) -> None:
    """Wait until the bootstrap server listens.

    SGLang's scheduler tries five times to register with it and then continues unregistered; on a busy machine the
    server's process takes longer to start.
    """
    address = urllib.parse.urlsplit(url)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((str(address.hostname), address.port or 0), timeout=1.0).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return


def _keep_indices_off_gpus(*_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False  # they would be copied on a CUDA stream


def _take_host_memory(_result: None, agent: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook that declares the memory as the host's; SGLang calls it GPU memory."""
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]


def _wait_for_events(_agent: Any, _name: str, config: Any) -> None:
    """Make nixl's thread wait for events: with its own delay of 0 it spins, and takes a core from all others."""
    config.pthrDelay = _MOST_WAIT_US
