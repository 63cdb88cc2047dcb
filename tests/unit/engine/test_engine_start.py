"""An engine that cannot start, or ends before it has said what it holds."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import NetworkConfig
from penstock.errors import SetupError, UnavailableError
from penstock.runtime.security import Security
from services.rollout.engine import server
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.server import _open
from services.rollout.engine.sglang import loading, settings


class Silent:
    """SGLang, of which a process has ended, answers nobody."""

    async def open(self) -> None:
        """Wait for an answer."""
        await asyncio.Event().wait()


async def test_an_engine_that_dies_before_its_first_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its end was noticed or not; it would neither serve nor be started again."""
    receiver: Any = Silent()
    engine: Any = SimpleNamespace(died=asyncio.Event(), death="one of SGLang's processes ended")
    opening = asyncio.create_task(_open(receiver, engine))
    await asyncio.sleep(0)
    engine.died.set()
    with pytest.raises(UnavailableError, match="one of SGLang's processes ended"):
        await opening
    monkeypatch.setattr(server, "_OPEN_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
        await _open(receiver, SimpleNamespace(died=asyncio.Event()))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["rollout.port", "metrics.port"])
async def test_a_taken_port_is_said_before_anything_is_loaded(key: str) -> None:
    """Otherwise an engine that is started again and again loads its model each time, and then ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"rollout.port": 0, "metrics.port": 0, key: taken.getsockname()[1]}
        asked: Any = SimpleNamespace(
            network=NetworkConfig(),
            rollout=SimpleNamespace(port=ports["rollout.port"]),
            metrics=SimpleNamespace(port=ports["metrics.port"]),
        )
        with pytest.raises(SetupError, match=rf"{key}: cannot listen on 127\.0\.0\.1:\d+"):
            await server.serve(asked, asyncio.Event(), security=Security())


def load(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any], **sglang: Any) -> Any:
    """Load an engine of which `start` takes the place of SGLang's."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", SimpleNamespace(Engine=start))  # type: ignore[arg-type]
    monkeypatch.setattr(settings, "has_cuda", lambda: False)
    monkeypatch.setattr(settings, "environment", lambda *_, **__: {})
    monkeypatch.setattr(settings, "server_args", lambda *_, **__: {})
    return loading.load(
        RolloutConfig(sglang=sglang),
        Path("of-mine"),
        network=NetworkConfig(),
        float32_head=False,
        group_timeout_s=1.0,
        router_replay=False,
        enable_metrics=False,
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("must be divisible"), "must be divisible"),
        (AssertionError(), ""),
        (TypeError("'<' not supported"), "'<' not supported"),
        (ValueError("unknown"), "unknown"),
    ],
    ids=["assertion", "no words", "type", "value"],
)
def test_a_value_that_sglang_cannot_take_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """However it shows; a traceback would have the launcher start the engine ten times more."""

    def start(**_: object) -> None:
        raise error

    with pytest.raises(
        SetupError, match=f"did not start with model of-mine: {type(error).__name__}: {reason}; its own log"
    ):
        load(monkeypatch, start)
    with pytest.raises(SetupError, match=rf"{reason}; check the values in \[rollout\.sglang\]; its own"):
        load(monkeypatch, start, chunked_prefill_size=100)


@pytest.mark.parametrize(("given", "num_threads"), [(None, 1), ("2", 2)])
def test_on_a_cpu_an_engine_computes_in_one_thread_if_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, num_threads: int
) -> None:
    """Also one of `penstock serve rollout`: engines whose threads wait for each other on few cores nearly stall."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert load(monkeypatch, lambda **_: torch.get_num_threads()) == num_threads
        assert os.environ.get("OMP_NUM_THREADS") == given
    finally:
        torch.set_num_threads(before)
