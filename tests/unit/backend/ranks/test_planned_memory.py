"""What ranks hold in their memory, gather and push, against what `penstock plan` says of it."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import load
from penstock.weights.adapter_names import is_adapter
from penstock.weights.shared_memory import SharedMemoryPool
from services.plan import memory_plan, trainer_plan
from services.plan.process_plan import Gpus
from services.plan.working_memory import WorkingBytes
from services.recipe import Recipe
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks import pushed_rows
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.ranks.sharding import local_shard
from services.trainer.batching.sequences import open_reader
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.plan.torchs_tracker import peak_beside
from tests.support.trainer.families import heard, random_qwen3, random_qwen3_moe, write_model
from tests.support.trainer.groups import IMAGES, make_group
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.unit.backend.ranks.test_pushed_rows import go_far, write_together
from tests.unit.backend.ranks.test_ranks import backend_of

ADAPTERS = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["text", "tower"]}}  # of which two ranks hold two rows and one
OF_TEXT = {"lora": {"rank": 4, "alpha": 6.0, "targets": ["text"]}}
PLANNED_OF_TEXT = ("--trainer.lora.rank=4", '--trainer.lora.targets=["text"]')
OF_ADAPTERS = ("--trainer.lora.rank=3", '--trainer.lora.targets=["text", "tower"]')
DIVIDED = {"expert_parallel": 2}
KL: dict[str, Any] = {"algorithm": {"kl": {"kind": "k3", "refresh": "copy", "refresh_every": 2}}}


def parts_of(path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, process: int = -1) -> list[dict[str, int]]:
    """At each moment, the parts of the memory of one of two ranks, without activations, by the words for them.

    The last process is a rank other than 0, the one before it is rank 0.
    """
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    base = ("--trainer.ranks=2", "--trainer.micro_batch_tokens=2048", f"--model.path={path}")
    recipe = load(Recipe, [], ['--run.name="a"', *base, *settings])
    plan = memory_plan.plan_memory(path, recipe, Gpus.parse("8x80"), image_share=0.0)
    return [
        {part.name.partition(",")[0]: part.size_bytes for part in moment.parts}
        for moment in plan.processes[process].moments
    ]


def held_bytes(ranks: Ranks, path: Path, settings: dict[str, Any]) -> dict[str, int]:
    """What a rank has of weights, gradients, averages and reference, by the names that plans give them."""
    backend = backend_of(ranks, path, dtype="bfloat16", **KL, **settings)
    groups = groups_of(path)
    take_step(backend, [groups], VERSION)
    parameters = dict(backend.policy.model.named_parameters())
    of_others = "base in bfloat16" if any(map(is_adapter, parameters)) else "weights in float32"
    held: dict[str, int] = {}
    for name, parameter in parameters.items():
        kind = "adapters in float32" if is_adapter(name) else of_others
        held[kind] = held.get(kind, 0) + local_shard(parameter.detach()).nbytes
    averages = backend._model.optimizer.state_dict()["averages"].values()
    held["AdamW's averages"] = sum(each.nbytes for state in averages for each in state.values() if each.ndim)
    backend.begin_step(VERSION + 1)
    backend.accumulate(groups)
    trained = backend._model.weights.trained.values()
    held["gradients"] = sum(weight.grad.nbytes for weight in trained if weight.grad is not None)
    backend.abort_step()
    assert backend._reference is not None
    reference = "reference adapters" if "adapters in float32" in held else "reference policy"
    held[reference] = sum(weight.nbytes for weight in backend._reference.shards.values())
    return held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "planned_with"),
    [
        ("dense", {}, ()),
        ("dense", ADAPTERS, OF_ADAPTERS),
        ("mixture", DIVIDED, ("--trainer.expert_parallel=2",)),
    ],
    ids=["dense", "adapters", "divided experts"],
)
def test_ranks_hold_what_is_planned(
    two: RankPool,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
    planned_with: tuple[str, ...],
) -> None:
    """The rank that has most: of adapters they have two rows and one, of all else as much."""
    path = tiny_model_path
    if family == "mixture":
        path = write_model(heard(random_qwen3_moe(), std_of_embedding=0.3), tmp_path / "model")
    kl = ("--algorithm.kl.kind=k3", "--algorithm.kl.coef=0.01")
    planned: dict[str, int] = {}
    for parts in parts_of(path, monkeypatch, *kl, *planned_with):
        planned |= parts
    of_ranks = two.run(held_bytes, path, settings)
    for name in of_ranks[0]:
        assert max(held[name] for held in of_ranks) == planned[name], name


def shards_of(backend: InProcessBackend) -> Iterator[torch.Tensor]:
    """Of every weight, what this rank holds."""
    for parameter in backend.policy.parameters():
        yield local_shard(parameter.detach())


def peak_of_a_push(ranks: Ranks, path: Path, settings: dict[str, Any], num_near: int, bucket_bytes: int) -> int:
    """The most bytes at a time that this rank's part in a push takes beside its shards."""
    backend = backend_of(ranks, path, dtype="bfloat16", **settings)
    write, peaks = backend.write_weights, []

    def tracked(*args: Any) -> None:
        peaks.append(peak_beside(shards_of(backend), lambda: write(*args))[1])

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(pushed_rows, "MAX_BUCKET_BYTES", bucket_bytes))
        stack.enter_context(unittest.mock.patch.object(backend, "write_weights", tracked))
        if ranks.rank >= num_near:
            go_far(stack)
        write_together(backend, ranks)
    (peak,) = peaks
    return peak


BUCKET_BYTES = 1 << 14
OF_MESSAGES = 1 << 12
"""What ranks tell each other takes less."""
ROUNDED = "a part of the rows"


@pytest.mark.parametrize(
    ("settings", "planned_with", "name", "bucket_bytes"),
    [
        pytest.param({}, (), ROUNDED, BUCKET_BYTES, id="small buckets"),
        pytest.param({}, (), ROUNDED, 16 << 20, id="large buckets"),
        pytest.param(ADAPTERS, OF_ADAPTERS, "every B", BUCKET_BYTES, id="adapters"),
    ],
)
def test_a_push_takes_what_is_planned(
    two: RankPool,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    planned_with: tuple[str, ...],
    name: str,
    bucket_bytes: int,
) -> None:
    """One bucket on a rank that writes into rank 0's memory; two, of the host, where rows are sent and received."""
    monkeypatch.setattr(trainer_plan, "MAX_BUCKET_BYTES", bucket_bytes)
    planned = parts_of(tiny_model_path, monkeypatch, *planned_with, process=-2)[-1][name]
    near = max(two.run(peak_of_a_push, tiny_model_path, settings, 2, bucket_bytes))
    assert planned <= near < planned + OF_MESSAGES
    far = max(two.run(peak_of_a_push, tiny_model_path, settings, 1, bucket_bytes))
    assert far < OF_MESSAGES + (2 * planned if name == ROUNDED else planned + 2 * bucket_bytes)


def test_one_rank_copies_without_more(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are rounded already, and go straight into the copy."""
    parts = parts_of(tiny_model_path, monkeypatch, "--trainer.ranks=1")[-1]
    backend = backend_of(ALONE, tiny_model_path, dtype="bfloat16")
    pool = SharedMemoryPool()
    _, peak = peak_beside(
        backend.policy.parameters(),
        lambda: WeightSnapshot.take(1, backend.export(), max_bucket_bytes=BUCKET_BYTES, pool=pool).wait(),
    )
    assert list(parts)[-1] == "copy to be pushed"
    assert parts["copy to be pushed"] <= peak < 1.02 * parts["copy to be pushed"]  # buckets are aligned


def write_wide_model(make: Any, folder: Path, **sizes: Any) -> Path:
    """A model whose weights take much more than the activations of a few tokens."""
    small = make()
    config = type(small.config).from_dict(small.config.to_dict() | {"layer_types": None} | sizes)
    return write_model(type(small)(config), folder)


def peak_of_a_row(ranks: Ranks, path: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """The bytes that this rank holds in a step, and the most beside them while it computes a row of 32 tokens."""
    backend = backend_of(ranks, path, dtype="bfloat16", gradient_checkpointing=True, **settings)
    reader = open_reader(path)
    groups = [
        reader.read(make_group(path, index=index, rewards=(1.0, 0.0), own_lengths=(2, 3)), IMAGES)
        for index in range(2 * ranks.size)
    ]
    first, second = groups[: ranks.size], groups[ranks.size :]
    take_step(backend, [first], VERSION)
    averages = backend._model.optimizer.state_dict()["averages"].values()
    backend.begin_step(VERSION + 1)
    backend.accumulate(first)
    gradients = [weight.grad for weight in backend._model.weights.trained.values() if weight.grad is not None]
    held = [*shards_of(backend), *gradients, *(each for state in averages for each in state.values() if each.ndim)]
    found = peak_beside(held, lambda: backend.accumulate(second))
    backend.abort_step()
    return found


WIDE_LAYERS = {"hidden_size": 1024, "intermediate_size": 2048}
LARGE_VOCABULARY = {"hidden_size": 256, "intermediate_size": 64, "vocab_size": 1 << 14}
WIDE_EXPERTS = {"hidden_size": 1024}
PLANNED_DIVIDED = ("--trainer.expert_parallel=2",)
PLANNED_KL = ("--algorithm.kl.kind=k3",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "make", "sizes", "settings", "planned_with", "least"),
    [
        pytest.param(2, random_qwen3, WIDE_LAYERS, {}, (), 1.0, id="layers"),
        pytest.param(2, random_qwen3, LARGE_VOCABULARY, {}, (), 0.85, id="vocabulary"),
        pytest.param(4, random_qwen3, LARGE_VOCABULARY, {}, (), 0.85, id="vocabulary, four ranks"),
        pytest.param(2, random_qwen3, LARGE_VOCABULARY, OF_TEXT, PLANNED_OF_TEXT, 1.0, id="frozen vocabulary"),
        pytest.param(2, random_qwen3_moe, WIDE_EXPERTS, {}, (), 1.0, id="experts"),
        pytest.param(2, random_qwen3_moe, WIDE_EXPERTS, DIVIDED, PLANNED_DIVIDED, 0.7, id="divided experts"),
        pytest.param(4, random_qwen3_moe, WIDE_EXPERTS, DIVIDED, PLANNED_DIVIDED, 0.8, id="divided, four ranks"),
        pytest.param(2, random_qwen3, WIDE_LAYERS | {"num_hidden_layers": 7}, KL, PLANNED_KL, 1.0, id="reference"),
    ],
)
def test_ranks_gather_what_is_planned(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    make: Any,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    planned_with: tuple[str, ...],
    least: float,
) -> None:
    """At a row's fullest moment: weights that arrive or are gathered, and their gradients until they are summed."""
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[num_ranks])
    path = write_wide_model(make, tmp_path / "model", **sizes)
    moments = parts_of(path, monkeypatch, f"--trainer.ranks={num_ranks}", *planned_with)
    planned = max(sum(parts.values()) for parts in moments)
    held, beside = max(pool.run(peak_of_a_row, path, settings))
    assert least * (planned - held) <= beside < 1.01 * (planned - held)
