"""Ranks that compute each row together take the steps of one: every family, two ranks and four, beside other settings.

Not collected by default: `make test-ranks`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.families import FULL_FAMILIES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import groups_of
from tests.unit.backend.ranks.test_mixed_precision import ROWS as BFLOAT16_ROWS
from tests.unit.backend.ranks.test_ranks import assert_same, trained
from tests.unit.backend.ranks.test_sequence_parallel import (
    attended,
    attended_together,
    gradients_of,
    require_same_gradients,
    row_of,
)

SHORT_ROWS: dict[str, Any] = {"micro_batch_tokens": 90}


@pytest.fixture(scope="module", params=FULL_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one of each family."""
    made = heard(FULL_FAMILIES[request.param](), std_of_embedding=0.3)
    return write_model(made, tmp_path_factory.mktemp("models") / request.param)


def test_every_familys_gradient_is_that_of_one_rank(two: RankPool, four: RankPool, model: Path) -> None:
    """Of each parameter, with rows of two ranks and of four, and with two rows at a time."""
    alone = gradients_of(ALONE, model, dict(SHORT_ROWS))
    require_same_gradients(alone, two.run(gradients_of, model, SHORT_ROWS | {"sequence_parallel": 2}))
    for size in (2, 4):
        require_same_gradients(alone, four.run(gradients_of, model, SHORT_ROWS | {"sequence_parallel": size}))


SETTINGS: dict[str, dict[str, Any]] = {
    "fewer rows than groups": {"micro_batch_tokens": 8192},
    "fixed rows": {"fixed_rows": True, "micro_batch_tokens": 256},
    "checkpointing": {"gradient_checkpointing": True, **SHORT_ROWS},
    "frozen tower": {"optimizer": {"learning_rates": {"tower": 0.0}, "grad_clip": 1e-3}, **SHORT_ROWS},
    "offload": {"optimizer": {"offload": True}, **SHORT_ROWS},
    "reference": {"algorithm": {"kl": {"kind": "k3", "refresh": "ema", "refresh_every": 1}}, **SHORT_ROWS},
    "sequence ratios and entropy": {
        "algorithm": {
            "ratio": "sequence",
            "correction": {"level": "sequence"},
            "aggregation": {"kind": "sequence"},
            "entropy": {"kind": "bonus", "coef": 0.01},
        },
        **SHORT_ROWS,
    },
    "replicas": {"hsdp_replicas": 2, **SHORT_ROWS},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_take_the_steps_of_one(four: RankPool, tiny_model_path: Path, name: str, size: int) -> None:
    """In two groups or in one, which has ranks of both replicas."""
    settings = SETTINGS[name]
    alone = trained(ALONE, tiny_model_path, {key: v for key, v in settings.items() if key != "hsdp_replicas"}, range(3))
    for together in four.run(trained, tiny_model_path, settings | {"sequence_parallel": size}, range(3)):
        assert_same(alone, together)


@pytest.mark.parametrize("router_replay", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_moe"])
def test_beside_expert_parallelism(four: RankPool, tmp_path: Path, kind: str, size: int, router_replay: bool) -> None:
    """Each rank's tokens travel to the owners of their experts, whichever row they are from and whoever chose them."""
    path = write_model(heard(FULL_FAMILIES[kind](), std_of_embedding=0.3), tmp_path / kind)
    rows = SHORT_ROWS | {"router_replay": router_replay}
    alone = trained(ALONE, path, dict(rows), range(3))
    settings = rows | {"expert_parallel": 2, "sequence_parallel": size}
    for together in four.run(trained, path, settings, range(3)):
        assert_same(alone, together)


def test_attention_over_any_row_is_that_of_one_rank(four: RankPool) -> None:
    """On four, whose single key head is repeated four times; the rows with 6 heads are left out."""
    seeds = [seed for seed in range(60) if seed % 3 != 1]
    shares = four.run(attended_together, seeds)
    for number, seed in enumerate(seeds):
        whole = attended(*row_of(seed), None)
        parts = [torch.cat(each, dim=1) for each in zip(*(share[number] for share in shares), strict=True)]
        for expected, found in zip(whole, parts, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def supervised(ranks: Ranks, path: Path, shared: dict[str, int]) -> tuple[dict[str, torch.Tensor], list[Any], Any]:
    """Averages of the gradient that the rank writes, and of the step loss, norm, entropy, and the loss before it."""
    config = BackendConfig(device="cpu", micro_batch_tokens=90, optimizer=OptimizerConfig(learning_rate=1e-3))
    backend = InProcessSupervisedBackend(path, config, seed=0, ranks=ranks, **shared)
    backend.load(None)
    sequences = [sequence for group in groups_of(path) for sequence in group.sequences]
    measured = backend.measure(sequences)
    metrics = backend.step(sequences)
    owned = backend.collect().tensors["optimizer"].owned
    averages = {name: tensor for name, tensor in owned.items() if name.endswith(".exp_avg")}
    return averages, [metrics["loss"], metrics["grad_norm"], measured.mean], np.array([metrics["entropy"]])


def test_a_supervised_step_is_that_of_one_rank(two: RankPool, model: Path) -> None:
    """Its gradient, loss and entropy, and the loss that was measured before it."""
    require_same_gradients(supervised(ALONE, model, {}), two.run(supervised, model, {"sequence_parallel": 2}))


def test_bfloat16_gradients_are_near_those_of_one_rank(two: RankPool, model: Path) -> None:
    """Queries, keys and values travel in bfloat16, and each rank rounds its own tokens' part of the gradient."""
    alone, numbers, _ = gradients_of(ALONE, model, dict(BFLOAT16_ROWS))
    shares = two.run(gradients_of, model, BFLOAT16_ROWS | {"sequence_parallel": 2})
    together = {name: tensor for averages, _, _ in shares for name, tensor in averages.items()}
    assert alone.keys() == together.keys()
    ours, theirs = (torch.cat([each[name].flatten() for name in alone]) for each in (alone, together))
    error = (theirs - ours).norm() / ours.norm()
    assert error < 5e-3, error
    for _, of_rank, _ in shares:
        assert of_rank == pytest.approx(numbers, rel=1e-3)


def test_after_twenty_steps_ranks_are_where_one_is(two: RankPool, four: RankPool, tiny_model_path: Path) -> None:
    """Loss, norm of the gradient and weights."""
    settings = {"optimizer": {"learning_rate": 1e-4}, **SHORT_ROWS}
    alone = trained(ALONE, tiny_model_path, dict(settings), range(20))
    for pool, size in ((two, 2), (four, 2), (four, 4)):
        found = pool.run(trained, tiny_model_path, settings | {"sequence_parallel": size}, range(20))
        assert_same(alone, found[0])
