"""Ranks of several machines, each of which counts its own restarts, meet in one start."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.trainer.backend.ranks import starts
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.start import open_ranks
from services.trainer.backend.ranks.starts import catching_up
from tests.support.waiting import HANG_S, wait_until
from tests.unit.backend.ranks.life.test_start import arguments, started_by_torchrun


def torchruns_store() -> dist.TCPStore:
    """One that outlives ranks. Not a fixture, whose value would outlive the test, nor of libuv, whose pipe would."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)


class Exits:
    """Records why ranks end, which would end the test."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.some = threading.Event()

    def __call__(self, rank: int, problem: str) -> None:
        """End rank `rank`."""
        self.reasons.append(f"rank {rank}: {problem}")
        self.some.set()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    """What ends, and why."""
    recorded = Exits()
    monkeypatch.setattr(starts, "leave", recorded)
    return recorded


class JoiningError(Exception):
    """The others did not come."""


def test_ranks_that_wait_in_an_earlier_start_than_the_others_end(
    tiny_model_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of waiting for 30 minutes, also if nobody of the next start has come as far as torchrun's store."""
    store = torchruns_store()

    def join(own: Any, *, rank: int, **_: object) -> None:
        with catching_up(store, rank=1, start=2):
            own.set(f"address of rank {rank}", "10.0.0.1")
            exits.some.wait(HANG_S)
        raise JoiningError

    started_by_torchrun(monkeypatch, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    monkeypatch.setattr(Ranks, "join", join)
    with pytest.raises(JoiningError):
        open_ranks(arguments(tiny_model_path), num_ranks=1)
    assert exits.reasons == ["rank 0: other ranks have begun start 1, and this one belongs to start 0"]
    store.wait(["start 0/address of rank 0"], timedelta(seconds=HANG_S))  # `set` does not wait for the store


def test_ranks_of_the_latest_start_wait_for_those_behind(exits: Exits) -> None:
    """Which end. Once ranks have joined, a later start no longer ends them here: the watch of beats does."""
    store = torchruns_store()
    with catching_up(store, rank=1, start=0), catching_up(store, rank=0, start=1):
        assert exits.some.wait(HANG_S)
    wait_until(lambda: all(each.name != "watch of starts" for each in threading.enumerate()))
    with catching_up(store, rank=1, start=2):
        pass
    assert exits.reasons == ["rank 1: other ranks have begun start 1, and this one belongs to start 0"]
