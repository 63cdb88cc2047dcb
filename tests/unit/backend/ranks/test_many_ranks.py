"""What rank 0 passes on to the others."""

import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.v1 import rollout_pb2
from penstock.weights.named_weights import NamedWeights
from penstock.weights.shared_memory import writing_into
from services.trainer.backend.ranks import processes
from services.trainer.backend.ranks.beats import Pulse
from services.trainer.backend.ranks.many_ranks import ManyRanksBackend
from tests.support.waiting import HANG_S

TORCHRUNS: Any = SimpleNamespace(are_own=False, blame=lambda: None, close=lambda: None)
WEIGHTS = {name: torch.tensor([value]) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}


class Broadcasts:
    """Ranks that are told what rank 0 says."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def broadcast(self, value: Any) -> Any:
        self.said.append(value)
        return value


def test_all_ranks_write_what_is_exported_when_it_is_read() -> None:
    """Each is told where; what they wrote is what is read."""

    def write(memory: rollout_pb2.SharedMemorySource, offsets: Mapping[str, int]) -> None:
        with writing_into(memory) as writer:
            for name, offset in offsets.items():
                writer.write(offset, WEIGHTS[name].view(torch.uint8))

    own: Any = SimpleNamespace(export=lambda: NamedWeights.of(WEIGHTS), write_weights=write)
    ranks: Any = Broadcasts()
    exported = ManyRanksBackend(own, ranks, TORCHRUNS, Pulse()).export()
    assert ranks.said == []
    assert {name: weight.item() for name, weight in exported} == {"a": 1.0, "b": 2.0, "c": 3.0}
    ((command, (_, offsets)),) = ranks.said
    assert command == "write_weights"
    assert offsets == {"a": 0, "b": 4, "c": 8}


def test_the_end_is_not_told_after_a_command_that_failed_on_rank_0_alone() -> None:
    """The others are still in it and would not listen; torchrun ends them."""

    def fail() -> None:
        raise MemoryError

    own: Any = SimpleNamespace(finish_step=fail)
    ranks: Any = Broadcasts()
    backend = ManyRanksBackend(own, ranks, TORCHRUNS, Pulse())
    with pytest.raises(MemoryError):
        backend.finish_step()
    backend.close()
    assert ranks.said == [("finish_step", ())]


def test_a_command_that_fails_because_a_rank_has_ended_names_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has seen a connection close, and the rank's process is still ending."""
    said: list[str] = []

    def end(problem: str) -> None:
        said.append(problem)
        others._closed.set()  # the real one ends the process that waits here

    monkeypatch.setattr(processes, "_BLAME_S", HANG_S)
    monkeypatch.setattr(processes, "end_trainer", end)

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen(["sh", "-c", "sleep 0.3; exit 3"], pass_fds=[theirs.fileno()]) as process:
        others = processes.RankProcesses([process], [ours])
        theirs.close()
        watch = threading.Thread(target=others._watch, args=(1,))
        watch.start()
        own: Any = SimpleNamespace(finish_step=fail)
        ranks: Any = Broadcasts()
        with pytest.raises(RuntimeError, match="Connection closed"):
            ManyRanksBackend(own, ranks, others, Pulse()).finish_step()
        assert said == ["rank 1 ended with 3"]
        watch.join()
        others.close()


def test_a_rank_that_ends_while_all_write_is_blamed(tmp_path: Path) -> None:
    """Torch has seen its connection close; what this rank cannot write itself is nobody else's end."""
    blamed: list[str] = []

    def gather(_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def write(_: None, folder: Path) -> dict[str, str]:
        (folder / "file").touch()
        return {}

    own: Any = SimpleNamespace(collect=lambda: None, write=write)
    ranks: Any = SimpleNamespace(broadcast=lambda value: value, gather_written=gather, rank=0)
    others: Any = SimpleNamespace(are_own=True, blame=lambda: blamed.append("rank 1"), close=lambda: None)
    with pytest.raises(RuntimeError, match="Connection closed"):
        ManyRanksBackend(own, ranks, others, Pulse()).save(tmp_path)
    assert blamed == ["rank 1"]
    ranks.gather_written = lambda outcome: [outcome]
    with pytest.raises(FileNotFoundError):
        ManyRanksBackend(own, ranks, others, Pulse()).save(tmp_path / "nowhere")
    assert blamed == ["rank 1"]
