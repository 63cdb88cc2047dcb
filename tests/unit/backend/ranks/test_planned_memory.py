"""What ranks hold in their memory, against what `penstock plan` says of it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.weights.adapter_names import is_adapter
from services.plan import memory_plan
from services.plan.process_plan import Gpus
from services.plan.working_memory import WorkingBytes
from services.recipe import Recipe
from services.trainer.backend.base import take_step
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.sharding import local_shard
from tests.support.trainer.families import heard, random_qwen3_moe, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.unit.backend.ranks.test_ranks import backend_of

ADAPTERS = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["text", "tower"]}}  # of which two ranks hold two rows and one
OF_ADAPTERS = ("--trainer.lora.rank=3", '--trainer.lora.targets=["text", "tower"]')
DIVIDED = {"expert_parallel": 2}
KL: dict[str, Any] = {"algorithm": {"kl": {"kind": "k3", "refresh": "copy", "refresh_every": 2}}}


def parts_of(path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[dict[str, int]]:
    """At each moment, the parts of the memory of one of two ranks, without activations, by the words for them."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    base = ("--trainer.ranks=2", "--trainer.micro_batch_tokens=2048", f"--model.path={path}")
    recipe = load(Recipe, [], ['--run.name="a"', *base, *settings])
    plan = memory_plan.plan_memory(path, recipe, Gpus.parse("8x80"), image_share=0.0)
    return [
        {part.name.partition(",")[0]: part.size_bytes for part in moment.parts} for moment in plan.processes[-1].moments
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
