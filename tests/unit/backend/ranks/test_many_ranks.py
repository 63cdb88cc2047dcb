"""What rank 0 passes on to the others."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.weights.named_weights import NamedWeights
from services.trainer.backend.ranks.beats import Pulse
from services.trainer.backend.ranks.many_ranks import ManyRanksBackend

TORCHRUNS: Any = SimpleNamespace(are_own=False, close=lambda: None)
WEIGHTS = {name: torch.zeros(1) for name in ("a", "b", "c")}


class Broadcasts:
    """Ranks that are told what rank 0 says."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def broadcast(self, value: Any) -> Any:
        self.said.append(value)
        return value


def test_an_export_that_its_reader_leaves_goes_on_to_its_end() -> None:
    """The others gather every weight with rank 0, so it must not stop before them."""
    gathered = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in WEIGHTS:
            gathered.append(name)
            yield name, WEIGHTS[name]

    def export() -> NamedWeights:
        return dataclasses.replace(NamedWeights.of(WEIGHTS), tensors=gather())

    own: Any = SimpleNamespace(export=export, begin_step=lambda version: None)
    ranks: Any = Broadcasts()
    backend = ManyRanksBackend(own, ranks, TORCHRUNS, Pulse())
    with closing(iter(backend.export())) as weights:
        assert next(weights)[0] == "a"
    assert gathered == ["a", "b", "c"]
    backend.begin_step(4)
    assert ranks.said == [("export", ()), ("begin_step", (4,))]


def test_the_end_is_not_told_after_a_command_that_failed_on_rank_0_alone() -> None:
    """The others are still in it and would not listen; torchrun ends them."""

    def fail() -> None:
        raise MemoryError

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", WEIGHTS["a"]
        raise MemoryError

    def export() -> NamedWeights:
        return dataclasses.replace(NamedWeights.of(WEIGHTS), tensors=gather())

    own: Any = SimpleNamespace(finish_step=fail, export=export)
    for name in ("finish_step", "export"):
        ranks: Any = Broadcasts()
        backend = ManyRanksBackend(own, ranks, TORCHRUNS, Pulse())
        with pytest.raises(MemoryError):
            backend.finish_step() if name == "finish_step" else list(backend.export())
        backend.close()
        assert ranks.said == [(name, ())]
