"""Ranks write what is pushed into memory of rank 0's process, each its own rows."""

import contextlib
import errno
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.v1 import rollout_pb2
from penstock.weights.digest import tensor_digest
from penstock.weights.shared_memory import SharedMemoryPool, Writer
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks import pushed_rows
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.trainer.families import heard, random_qwen3_5_text, random_qwen3_moe, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.test_ranks import backend_of, steps_of


def pushed(ranks: Ranks, path: Path, settings: dict[str, Any], num_near: int) -> tuple[dict[str, int], dict[str, int]]:
    """Digests by name of what rank 0 pushes after a step, and of the same weights as ranks gather them.

    Ranks from `num_near` on are on another machine, as far as they can tell.
    """
    backend = backend_of(ranks, path, **settings)
    steps_of(backend, path, [0])
    gathered = {name: tensor_digest(weight) for name, weight in backend.export()}
    with contextlib.ExitStack() as stack:
        if ranks.rank >= num_near:
            go_far(stack)
        return write_together(backend, ranks), gathered


def go_far(stack: contextlib.ExitStack) -> None:
    """Be on another machine, where nothing can be written."""
    stack.enter_context(unittest.mock.patch("penstock.weights.shared_memory.machine", return_value="another"))
    stack.enter_context(unittest.mock.patch.object(Writer, "write", side_effect=AssertionError("it cannot be opened")))


def write_together(backend: InProcessBackend, ranks: Ranks) -> dict[str, int]:
    """Have all ranks write; digests of what rank 0 has then, and nothing for the others."""
    if ranks.rank:
        backend.write_weights(*ranks.broadcast(None))
        return {}

    def write(memory: rollout_pb2.SharedMemorySource, offsets: Mapping[str, int]) -> None:
        backend.write_weights(*ranks.broadcast((memory, offsets)))

    own = backend.export()
    weights = own.written_by(write)
    assert weights.base_digests == own.base_digests
    snapshot = WeightSnapshot.take(1, weights, max_bucket_bytes=4096, pool=SharedMemoryPool(), is_offered=False)
    assert snapshot.shared_memory is None
    return dict(snapshot.digests)


@pytest.mark.parametrize(
    ("settings", "num_near"),
    [
        ({"dtype": "bfloat16"}, 1),
        ({"optimizer": {"offload": True}}, 2),
        *(
            pytest.param(settings, num_near, marks=pytest.mark.variant)
            for settings, num_near in (
                ({}, 2),
                ({}, 1),
                ({"dtype": "bfloat16"}, 2),
                ({"optimizer": {"offload": True}}, 1),
            )
        ),
    ],
    ids=str,
)
def test_two_ranks_push_every_byte(
    two: RankPool, tiny_model_path: Path, settings: dict[str, Any], num_near: int
) -> None:
    """Of every weight, in its place; also if one of them cannot open the memory."""
    (written, gathered), (nothing, _) = two.run(pushed, tiny_model_path, settings, num_near)
    assert not nothing
    assert list(written) == list(gathered)
    assert written == gathered


def test_two_ranks_push_the_decays_of_linear_attention_in_float32(two: RankPool, tmp_path: Path) -> None:
    """With the values that they compute with, which are rounded."""
    path = write_model(heard(random_qwen3_5_text()), tmp_path / "model")
    (written, gathered), _ = two.run(pushed, path, {"dtype": "bfloat16"}, 1)
    assert written == gathered
    dtypes, unrounded = two.run(pushed_dtypes, path)[0]
    assert unrounded == []
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)
    }


def pushed_dtypes(ranks: Ranks, path: Path) -> tuple[dict[str, str], list[str]]:
    """The dtype in which each weight is pushed, and the names of those that have more digits than bfloat16."""
    backend = backend_of(ranks, path, dtype="bfloat16")
    weights = backend.export()
    dtypes = {spec.name: spec.dtype for spec in weights.specs}
    kept = list(weights)
    assert dtypes == {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in kept}
    return dtypes, [name for name, tensor in kept if not torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_near"),
    [
        ({}, 4),
        ({"hsdp_replicas": 2}, 1),
        ({"expert_parallel": 2}, 2),
        pytest.param({"hsdp_replicas": 4}, 4, marks=pytest.mark.variant),
        pytest.param({"expert_parallel": 4}, 4, marks=pytest.mark.variant),
    ],
    ids=str,
)
def test_four_ranks_push_every_byte(four: RankPool, tmp_path: Path, settings: dict[str, Any], num_near: int) -> None:
    """Of replicas one writes, and experts are in the order of those who own them."""
    path = write_model(heard(random_qwen3_moe(num_experts=8), std_of_embedding=0.3), tmp_path / "model")
    (written, gathered), *_ = four.run(pushed, path, settings, num_near)
    assert list(written) == list(gathered)
    assert written == gathered


def failing(ranks: Ranks, path: Path, failing_rank: int, num_near: int) -> str:
    """What ends a push for which a rank has no memory: a near one to write, a far one to round."""
    backend = backend_of(ranks, path)
    no_memory = OSError(errno.ENOMEM, "no memory")
    with contextlib.ExitStack() as stack:
        if ranks.rank >= num_near:
            go_far(stack)
        if ranks.rank == failing_rank:
            stack.enter_context(unittest.mock.patch.object(Writer, "write", side_effect=no_memory))
            if ranks.rank >= num_near:
                stack.enter_context(unittest.mock.patch.object(pushed_rows._Part, "rounded", side_effect=no_memory))
        with pytest.raises((OSError, RuntimeError)) as raised:
            write_together(backend, ranks)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(("failing_rank", "num_near"), [(1, 2), (0, 1), (1, 1)])
def test_a_rank_that_cannot_write_ends_the_push(
    two: RankPool, tiny_model_path: Path, failing_rank: int, num_near: int
) -> None:
    """On every rank: none of them goes on to the next command alone, and none waits for rows that do not come."""
    reasons = two.run(failing, tiny_model_path, failing_rank, num_near)
    assert all("no memory" in reason for reason in reasons)
    assert f"rank {failing_rank} cannot go on" in reasons[1 - failing_rank]
    assert two.run(pushed, tiny_model_path, {}, num_near)[0][0], "they push again"


def place(ranks: Ranks, path: Path) -> int:
    """How many collectives this rank enters in a push; the last two send their rows to the first."""
    backend = backend_of(ranks, path)
    before = ranks.num_collectives()
    with contextlib.ExitStack() as stack:
        if ranks.rank >= 2:
            go_far(stack)
        write_together(backend, ranks)
    return ranks.num_collectives() - before


@pytest.mark.slow
def test_what_is_sent_moves_no_rank_ahead(four: RankPool, tiny_model_path: Path) -> None:
    """Or the watch over ranks that wait for each other would take one that has written for one that is late."""
    assert len(set(four.run(place, tiny_model_path))) == 1
