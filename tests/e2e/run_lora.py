"""`penstock train` with adapters on real SGLang engines. Not collected: `make test-lora`.

Trainer and an engine are killed on the way, and what was trained is exported and loaded.
"""

from pathlib import Path

import pytest

from penstock.config import load
from penstock.testing.train_process import RECIPE, started
from services.cli import main
from services.recipe import Recipe
from tests.support.engine.family import FELT, MOST, difference, engine_of
from tests.support.engine.reference import Reference
from tests.support.trainer.checkpoints import tensors_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

NUM_STEPS = 12
LARGEST = 1e-5
"""Of |dlogp| between engine and trainer where both have the same version."""


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
async def test_a_run_of_adapters(nats_url: str, tmp_path: Path) -> None:
    """Every push has the adapters alone, and engines agree with the trainer through kills.

    The last step is reproduced from its checkpoint, and an engine loads the export.
    """
    overrides = {
        "run.dir": tmp_path / "runs",
        "rollout.replicas": 2,
        "trainer.num_steps": NUM_STEPS,
        "trainer.groups_per_step": 8,
        "trainer.checkpoint_every": 2,
        "trainer.record_groups": "true",
        "trainer.lora.rank": 8,
        "trainer.lora.alpha": 16,
        "trainer.optimizer.learning_rate": 1e-3,
        "algorithm.kl.kind": "k3",
        "algorithm.kl.coef": 1e-3,
    }
    with started(tmp_path, str(RECIPE), *(f"--{key}={value}" for key, value in overrides.items())) as train:
        train.wait_for_step(4, timeout_s=300)
        train.kill("trainer")
        train.wait_for_step(7, timeout_s=300)
        train.kill("rollout")
        assert train.wait(600) == 0, train.tail()
        rows, folder = train.rows(), train.folder
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    newest = folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    size_bytes = sum(tensor.nbytes for tensor in tensors_of(newest / "adapter").values())
    for row in rows:
        assert row["push_bytes"] == size_bytes
        assert row["grad_norm"] > 0
        assert row.get("dlogp_max_current", 0.0) <= LARGEST, row
    assert any("dlogp_max_current" in row for row in rows)
    assert sum(row["push_failed_replicas"] for row in rows[-3:]) == 0
    assert abs(rows[0]["kl_reference"]) < 1e-6, "the reference is the base"
    assert abs(rows[-1]["kl_reference"]) > 1e-5
    assert not (newest / "model").exists()
    assert main(["replay", str(folder), "--step", str(NUM_STEPS)]) == 0, "the last step is not reproduced"

    recipe = load(Recipe, [folder / "config.toml"])
    assert recipe.model is not None
    assert main(["export", str(folder), str(tmp_path / "exported"), "--dtype=float32"]) == 0
    async with engine_of(tmp_path / "exported", nats_url, tmp_path) as engine:
        assert await difference(engine, Reference(tmp_path / "exported")) <= MOST
        assert await difference(engine, Reference(recipe.model.path)) > FELT / 100
