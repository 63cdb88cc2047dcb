"""Whether a stored run is in use is judged by its own settings, which whoever asks does not know."""

import asyncio
import functools
from types import SimpleNamespace

import pytest

from penstock.bus.buckets import lock
from penstock.bus.buckets.lock import TRAINER, Lock, claim
from penstock.bus.connection import Bus
from penstock.bus.stored import stored_runs
from penstock.bus.stored.stored_runs import delete_stored_run, list_stored_runs
from penstock.config import BusConfig
from penstock.errors import SetupError

TTL_S = 6 * BusConfig().lease_ttl_s


class Trainer:
    """Renews its lock every third of `TTL_S`, on a clock that moves only while somebody sleeps."""

    def __init__(self, held: Lock) -> None:
        self.at = 0.0
        self.is_alive = True
        self._lock = held
        self._renewed_at = 0.0

    async def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.at += seconds
        if self.is_alive and self.at - self._renewed_at >= TTL_S / 3:
            await self._lock.confirm()
            self._renewed_at = self.at


async def test_a_trainer_that_renews_its_lock_rarely_is_alive(
    bus: Bus, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run, which has no engine yet, is listed as running and is not deleted; once it has died, it is."""
    await bus.bucket("replicas", ttl_s=TTL_S)
    trainer = Trainer(await claim(bus, TRAINER, ttl_s=TTL_S))
    for module in (lock, stored_runs):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": trainer.sleep}))
    monkeypatch.setattr(stored_runs, "claim", functools.partial(claim, clock=lambda: trainer.at))
    stranger = Bus(bus.client, BusConfig(url=bus.config.url), run="")
    assert {run.name: run.is_running for run in await list_stored_runs(stranger)}[run_name]
    with pytest.raises(SetupError, match=f"run '{run_name}' is in use: another trainer of this run is running"):
        await delete_stored_run(stranger, run_name)
    trainer.is_alive = False
    await delete_stored_run(stranger, run_name)
    assert run_name not in {run.name for run in await list_stored_runs(stranger)}
