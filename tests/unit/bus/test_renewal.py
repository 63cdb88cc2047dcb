"""When a lease is written: at each change, and of a state that passes only if it stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.bus.buckets import leases
from penstock.bus.buckets.leases import Lease
from penstock.runtime.process import end_task
from tests.support.waiting import HANG_S, until


class Engine:
    """Its state, which is passing while it is UPDATING, and what was written of it."""

    def __init__(self) -> None:
        self.state = "READY"
        self.changed = asyncio.Event()
        self.written: list[str] = []

    async def put(self, key: str, value: bytes) -> None:
        self.written.append(value.decode())

    def enter(self, state: str) -> None:
        self.state = state
        self.changed.set()

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        bucket: Any = self
        lease = Lease(bucket, "e", lambda: self.state.encode(), timeout_s=10 * HANG_S)
        task = asyncio.create_task(lease.renew_on_change(self.changed, is_passing=lambda: self.state == "UPDATING"))
        try:
            yield
        finally:
            await end_task(task)


async def test_a_state_that_passes_soon_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who watch would read it, and the next at once."""
    monkeypatch.setattr(leases, "_PASSING_S", 10 * HANG_S)
    engine = Engine()
    async with engine.renewing():
        engine.enter("UPDATING")
        await until(lambda: not engine.changed.is_set())
        engine.enter("READY")
        await until(lambda: bool(engine.written))
        engine.enter("BROKEN")
        await until(lambda: len(engine.written) == 2)
    assert engine.written == ["READY", "BROKEN"]


async def test_a_state_that_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another change."""
    monkeypatch.setattr(leases, "_PASSING_S", 0.0)
    engine = Engine()
    async with engine.renewing():
        engine.enter("UPDATING")
        await until(lambda: engine.written == ["UPDATING"])
