"""The copy of an evaluation's weights: where a recipe may need it, and its size against what the trainer loads."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from services.plan import memory_plan
from services.plan.held_out_copy import HELD_OUT_COPY, may_need_held_out_copy
from services.plan.memory_plan import plan_memory
from services.plan.process_plan import Gpus, MemoryPlan
from services.plan.working_memory import WorkingBytes
from services.recipe import Recipe
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.config import BackendConfig, WeightSyncConfig
from services.trainer.weight_sync.held_out.hold_out import HoldOut
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights
from services.trainer.weight_sync.snapshot import WeightSnapshot

MAX_BUCKET_BYTES = 1 << 16
EVALUATED = ("--evaluation.sets={s = {num_prompts = 4}}", "--evaluation.every=5")


def recipe_of(*settings: str) -> Recipe:
    """One with these settings."""
    return load(Recipe, [], ['--run.name="a"', *settings])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--rollout.replicas=2",), True),
        (("--rollout.replicas=1",), False),
        (("--rollout.replicas=2", "--evaluation.held_out_replicas=0"), False),
        (("--rollout.replicas=2", "--trainer.num_steps=6"), True),
        (("--rollout.replicas=2", "--trainer.num_steps=5"), False),
        (("--rollout.replicas=2", "--trainer.num_steps=5", "--evaluation.at_start=true"), True),
        (("--rollout.replicas=2", "--evaluation.every=0", "--evaluation.at_end=true"), False),
        (("--rollout.replicas=0", "--rollout.prefill=2", "--rollout.decode=2"), True),
        (("--rollout.replicas=0", "--rollout.prefill=2", "--rollout.decode=1"), False),
        (("--rollout.replicas=1", "--rollout.prefill=1", "--rollout.decode=1"), True),
        (("--rollout.replicas=0",), True),
    ],
    ids=str,
)
def test_it_is_needed_where_an_evaluation_holds_replicas_out(settings: tuple[str, ...], expected: bool) -> None:
    """Beside training, which then goes on with others; without engines of its own a run has those that others start."""
    assert may_need_held_out_copy(recipe_of(*EVALUATED, *settings)) is expected


def test_a_run_that_does_not_evaluate_needs_none() -> None:
    """However many replicas it has, and whatever sets `penstock eval` is given."""
    assert not may_need_held_out_copy(recipe_of("--rollout.replicas=4", "--evaluation.sets={s = {num_prompts = 4}}"))


def parts_of(plan: MemoryPlan) -> list[dict[str, int]]:
    """Of every moment of the trainer's first rank, and of the host in a step: the sizes of the parts by name."""
    first = plan.processes[1].moments
    return [{part.name: part.size_bytes for part in moment.parts} for moment in (*first, plan.host[-1])]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_it_takes_what_the_trainer_loads(
    tiny_model_path: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the copies that it publishes: on its GPU, or of several ranks in the host's memory."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    config = BackendConfig(device="cpu", dtype="bfloat16")
    backend = InProcessBackend(tiny_model_path, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    published = WeightSnapshot.take(5, backend.export(), max_bucket_bytes=MAX_BUCKET_BYTES)
    record: Any = None
    hold_out = HoldOut(step=4, kept=KeptWeights.write(tmp_path, published), num=1, record=record)
    weights, selector = await hold_out.open_weights(
        WeightSyncConfig(), host="127.0.0.1", backend="gloo", keeps_on_host=True, max_bucket_bytes=MAX_BUCKET_BYTES
    )
    await selector.close()
    loaded = sum(bucket.nbytes for bucket in weights.buckets)
    settings = (f"--model.path={tiny_model_path}", "--rollout.replicas=2", f"--trainer.ranks={ranks}")
    with_copy, without = (
        plan_memory(tiny_model_path, recipe_of(*settings, *more), Gpus.parse("8x80"), image_share=0.0)
        for more in (EVALUATED, ())
    )
    *on_device, on_host = parts_of(with_copy)
    if ranks == 1:
        assert [parts[HELD_OUT_COPY] for parts in on_device] == [loaded] * len(on_device)
        assert HELD_OUT_COPY not in on_host
    else:
        assert [parts[f"{HELD_OUT_COPY}, on the host"] for parts in on_device] == [0] * len(on_device)
        assert on_host[HELD_OUT_COPY] == loaded
    assert not any(HELD_OUT_COPY in name for parts in parts_of(without) for name in parts)
