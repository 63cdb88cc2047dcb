"""Pushes of adapters: what fits an engine's model, and that a merged matrix depends on base and push alone."""

from pathlib import Path

import pytest
import torch

from penstock.errors import InvalidRequestError
from penstock.weights.adapters import adapted_weights, change_of, merged
from penstock.weights.digest import XXH3, tensor_digest, tensor_digests
from penstock.weights.manifest import Manifest, TensorSpec, pack, specs_of
from penstock.weights.weight_files import write_weight_files
from services.rollout.engine.sglang_plugin import merged_adapters
from services.rollout.engine.sglang_plugin.merged_adapters import MergedAdapters
from services.rollout.engine.sglang_plugin.shards import Cut, Section, Shard
from services.rollout.engine.sglang_plugin.transports import DiskTransport
from services.rollout.engine.sglang_plugin.variables import HeldParameter
from services.rollout.engine.sglang_plugin.weight_loader import take_into
from services.rollout.engine.weight_sync.incoming_push import require_fit

Tensors = dict[str, torch.Tensor]
HELD = {
    "q.weight": HeldParameter(dtype="bfloat16", shape=(6, 4)),
    "o.weight": HeldParameter(dtype="bfloat16", shape=(4, 6)),
    "norm.weight": HeldParameter(dtype="bfloat16", shape=(4,)),
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapter(layer: str, seed: int, *, rank: int = 2) -> Tensors:
    """One of a layer's matrix."""
    rows, columns = HELD[f"{layer}.weight"].shape
    return {
        f"{layer}.lora_A.weight": drawn(rank, columns, seed=seed),
        f"{layer}.lora_B.weight": drawn(rows, rank, seed=seed + 100),
    }


def base() -> Tensors:
    """Weights without adapters."""
    return {name: drawn(*held.shape, seed=7).bfloat16() for name, held in HELD.items()}


def with_adapter(weight: torch.Tensor, pushed: Tensors, layer: str) -> torch.Tensor:
    """The matrix, computed here."""
    a, b = pushed[f"{layer}.lora_A.weight"], pushed[f"{layer}.lora_B.weight"]
    return (weight.float() + b @ a).bfloat16()


class Engine:
    """One process of an engine that holds weights, or a part of each."""

    def __init__(self, shards: dict[str, Shard]) -> None:
        self.shards = shards
        self.adapters = MergedAdapters(
            lambda: self.shards,
            lambda kind: tensor_digests(((name, each.tensor) for name, each in self.shards.items()), kind),
        )

    def take(self, pushed: Tensors, folder: Path) -> None:
        """Receive a whole push, from files."""
        manifest = Manifest.plan(specs_of(pushed), max_bucket_bytes=1 << 20)
        buckets = [pack(bucket, pushed) for bucket in manifest.buckets]
        written = write_weight_files(folder, 1, manifest, buckets)
        room = self.adapters.make_room(manifest, XXH3)
        take_into(room, manifest, DiskTransport(folder=str(written)), {})
        self.adapters.merge()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**adapter("q", 1), "norm.weight": torch.zeros(4)}, "mixes adapters .q.lora_A.weight. and whole weights"),
        ({"q.lora_A.weight": torch.zeros(2, 4)}, r"the adapter of q lacks \.lora_B\.weight"),
        ({**adapter("q", 1), "q.lora_B.weight": torch.zeros(6, 3)}, r"\[2, 4\] and \[6, 3\], not \[rank, in\]"),
        ({name: each.bfloat16() for name, each in adapter("q", 1).items()}, "push adapters in float32"),
        ({"z.lora_A.weight": torch.zeros(2, 4), "z.lora_B.weight": torch.zeros(6, 2)}, "changes z.weight, which"),
        (
            {"q.lora_A.weight": torch.zeros(2, 6), "q.lora_B.weight": torch.zeros(4, 2)},
            r"as \[4, 6\], the engine holds",
        ),
        ({"norm.lora_A.weight": torch.zeros(2, 1), "norm.lora_B.weight": torch.zeros(4, 2)}, r"the engine holds \[4\]"),
    ],
)
def test_a_push_of_adapters_that_does_not_fit_is_refused(tensors: Tensors, message: str) -> None:
    """Before anything is paused, by name."""
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=1 << 20)
    with pytest.raises(InvalidRequestError, match=message):
        require_fit(manifest, HELD, is_shared=False)


def test_adapters_of_some_matrices_fit() -> None:
    """And a push of whole weights has none."""
    manifest = Manifest.plan(specs_of(adapter("q", 1)), max_bucket_bytes=1 << 20)
    require_fit(manifest, HELD, is_shared=True)
    assert adapted_weights(manifest)["q.weight"].changed_shape == (6, 4)
    whole = Manifest.plan([TensorSpec(name="q.weight", dtype="float32", shape=(6, 4))], max_bucket_bytes=1 << 20)
    assert adapted_weights(whole) == {}


def test_weights_depend_on_base_and_push_alone(tmp_path: Path) -> None:
    """After pushes of other adapters, of other layers and ranks, and one that ended half-way: to the bit.

    The digests are those of the push and of the base, which a merge must not have changed.
    """
    engine = Engine({name: Shard(tensor=each) for name, each in base().items()})
    engine.take({**adapter("q", 1), **adapter("o", 2)}, tmp_path)
    assert not torch.equal(engine.shards["o.weight"].tensor, base()["o.weight"])
    for seed in range(3, 9):
        engine.take(adapter("q", seed, rank=1 + seed % 3), tmp_path)
    assert torch.equal(engine.shards["o.weight"].tensor, base()["o.weight"])
    engine.shards["q.weight"].tensor.fill_(3.0)  # as far as a push came that was never merged
    last = adapter("q", 9)
    engine.take(last, tmp_path)
    assert torch.equal(engine.shards["q.weight"].tensor, with_adapter(base()["q.weight"], last, "q"))
    assert torch.equal(engine.shards["norm.weight"].tensor, base()["norm.weight"])
    assert engine.adapters.digests(XXH3) == {
        name: tensor_digest(tensor, XXH3) for name, tensor in {**base(), **last}.items()
    }


def test_digests_of_another_kind_are_those_of_the_base_too(tmp_path: Path) -> None:
    """A trainer on another device asks for another kind, when the weights contain adapters already."""
    engine = Engine({name: Shard(tensor=each) for name, each in base().items()})
    pushed = adapter("q", 1)
    engine.take(pushed, tmp_path)
    engine.adapters.make_room(Manifest.plan(specs_of(pushed), max_bucket_bytes=1 << 20), "multilinear")
    engine.adapters.merge()
    assert torch.equal(engine.shards["q.weight"].tensor, with_adapter(base()["q.weight"], pushed, "q"))
    found = engine.adapters.digests("multilinear")
    assert found["q.weight"] == tensor_digest(base()["q.weight"], "multilinear")


@pytest.mark.parametrize(("layer", "dim", "size"), [("q", 0, 6), ("o", 1, 6)])
def test_processes_that_share_a_matrix_merge_their_parts(tmp_path: Path, layer: str, dim: int, size: int) -> None:
    """Two processes with half of the rows, or of the columns: together they hold the merged matrix, to the bit."""
    pushed, whole = adapter(layer, 5), base()[f"{layer}.weight"]
    parts = []
    for rank in range(2):
        cut = Cut(dim=dim, sections=(Section(size=size, stride=size // 2),), rank=rank)
        shard = Shard(tensor=whole.narrow(dim, rank * size // 2, size // 2).clone(), cut=cut)
        engine = Engine({f"{layer}.weight": shard})
        for seed in (4, 5):
            engine.take(adapter(layer, seed), tmp_path)
        parts.append(shard.tensor)
    assert torch.equal(torch.cat(parts, dim=dim), with_adapter(whole, pushed, layer))


@pytest.mark.parametrize("step", ["change_of", "_on_host"])
def test_a_process_that_could_not_merge_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """By its digests: SGLang passes on what became of rank 0's, and the other one's matrix is of the push before."""
    whole, last = base(), {**adapter("q", 5), **adapter("o", 6)}
    ranks = [Engine({name: Shard(tensor=each.clone()) for name, each in whole.items()}) for _ in range(2)]
    for engine in ranks:
        engine.take(adapter("q", 4), tmp_path)
    ranks[0].take(last, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(merged_adapters, step, _without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            ranks[1].take(last, tmp_path)
    pushed = {name: tensor_digest(tensor, XXH3) for name, tensor in {**whole, **last}.items()}
    assert ranks[0].adapters.digests(XXH3) == pushed
    assert not ranks[1].adapters.digests(XXH3).items() & pushed.items()
    ranks[1].take(last, tmp_path)
    assert ranks[1].adapters.digests(XXH3) == pushed


def _without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError


def test_a_change_of_zero_changes_nothing() -> None:
    """So that a policy begins as its base; and a sum is rounded once."""
    weight = drawn(6, 4, seed=1).bfloat16()
    assert torch.equal(merged(weight, change_of(drawn(2, 4, seed=2), torch.zeros(6, 2))), weight)
