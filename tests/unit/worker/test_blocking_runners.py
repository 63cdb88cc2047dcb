"""Runners that are blocking functions: each has a thread, which ends with its sample."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.agents import AgentSession
from penstock.runtime import own_thread
from services.rollout.worker.agents.runners import FunctionRunner
from tests.support.waiting import HANG_S, until

SESSION: Any = None  # these runners ask it nothing


async def cancelled(function: Callable[[AgentSession], float], began: threading.Event) -> None:
    """Have the function play a sample that ends as soon as it has begun."""
    task = asyncio.create_task(FunctionRunner(function).run(SESSION))
    await until(began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_each_has_a_thread_of_its_own() -> None:
    """The event loop goes on, and any number of them can wait at once."""
    everyone = threading.Barrier(40, timeout=60.0)

    def wait(session: AgentSession) -> float:
        return float(everyone.wait() >= 0)

    runner = FunctionRunner(wait)
    results = await asyncio.gather(*(runner.run(SESSION) for _ in range(40)))
    assert {result.reward for result in results} == {1.0}


async def test_its_thread_ends_with_the_sample() -> None:
    """Or else a worker has one more with every sample that hangs."""
    began, stop, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def poll(session: AgentSession) -> float:
        threads.append(threading.current_thread())
        began.set()
        while not stop.is_set():
            time.sleep(0.001)
        return 1.0

    await cancelled(poll, began)
    try:
        await until(lambda: not threads[0].is_alive())
    finally:
        stop.set()


async def test_a_thread_that_nothing_interrupts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of those that still run, so that a person sees them grow."""
    monkeypatch.setattr(own_thread, "_END_S", 0.0)
    monkeypatch.setattr(own_thread, "_left_behind", set())
    hangs, threads = threading.Event(), list[threading.Thread]()

    def reports() -> list[int]:
        return [event["num_threads"] for event in events if event["event"] == "runner.left_behind"]

    with capture_logs() as events:
        for number in (1, 2):
            began = threading.Event()

            def hang(session: AgentSession, began: threading.Event = began) -> float:
                threads.append(threading.current_thread())
                began.set()
                return float(hangs.wait(2 * HANG_S))

            await cancelled(hang, began)
            await until(lambda number=number: len(reports()) == number)
    assert reports() == [1, 2]
    hangs.set()
    await until(lambda: not any(thread.is_alive() for thread in threads))
