"""How a mixture's load metrics are counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.algorithm.metrics.experts import expert_stats
from services.trainer.backend.base import take_step
from services.trainer.backend.batch import measured_samples
from services.trainer.backend.policy.experts.mixture import routers_of
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.ranks.ranks import ALONE
from services.trainer.batching.packing import Block
from services.trainer.batching.rows import build_row
from services.trainer.batching.sequences import TrainSequence
from tests.support.trainer.families import MIXTURES, heard, write_model
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.unit.backend.ranks.test_ranks import backend_of


def test_the_busiest_expert_is_compared_with_the_mean() -> None:
    """By hand: of 4 experts the busiest has twice the mean, in another layer all have the same."""
    found = expert_stats(torch.tensor([[8, 4, 4, 0], [4, 4, 4, 4]]))
    assert found == {"max_vio_mean": 0.5, "max_vio_max": 1.0, "unused_expert_fraction": 0.125}


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's folder."""
    made = heard(MIXTURES[request.param](), std_of_embedding=0.3)
    return write_model(made, tmp_path_factory.mktemp("models") / request.param)


def counted_one_by_one(path: Path, sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """Tokens that chose each expert, with each sequence computed alone."""
    policy = load_policy(path, temperature=1.0, forbidden_ids=())
    chosen: dict[int, list[torch.Tensor]] = {}
    routers = list(routers_of(policy.model))
    for number, router in enumerate(routers):
        router.register_forward_hook(
            lambda *args, number=number: chosen.setdefault(number, []).append(args[-1][2])  # the experts
        )
    counts = torch.zeros(len(routers), routers[0].num_experts, dtype=torch.int64)
    for number, sequence in enumerate(sequences):
        chosen.clear()
        with torch.no_grad():
            policy(build_row(sequences, [Block(prefix_length=0, sequences=(number,))]))
        for layer, [experts_TK] in chosen.items():
            for place in sequence.loss_mask_X.nonzero()[0] - 1:  # what predicts the token
                counts[layer, experts_TK[place]] += 1
    return counts


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 90},
        {"micro_batch_tokens": 8192},
        {"micro_batch_tokens": 8192, "share_prompts": False},
        {"micro_batch_tokens": 256, "fixed_rows": True},
        {"micro_batch_tokens": 90, "gradient_checkpointing": True},
        {"micro_batch_tokens": 90, "algorithm": {"kl": {"kind": "k3"}}},
        {"micro_batch_tokens": 90, "algorithm": {"rejection": {"kind": "opsm"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_chunks", [3, pytest.param(1, marks=pytest.mark.variant)])
def test_counts_do_not_depend_on_the_cut(path: Path, settings: dict[str, Any], num_chunks: int) -> None:
    """Each own token is counted once, however rows share prompts, are padded, or are computed again."""
    groups = groups_of(path)[:3]  # all of them have a signal; one sample is masked
    chunks = [groups] if num_chunks == 1 else [[group] for group in groups]
    metrics = take_step(backend_of(ALONE, path, **dict(settings)), chunks, VERSION)
    sequences = [sequence for group in groups for sequence in group.sequences]
    expected = expert_stats(counted_one_by_one(path, sequences))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_samples_that_are_measured_stand_for_the_others(path: Path) -> None:
    """Of samples without gradient, one of which is masked here, some are computed and weigh as much as all."""
    groups = groups_of(path)
    metrics = take_step(backend_of(ALONE, path), [groups], VERSION)
    masked = groups[1].samples[3]
    flat = [masked, *groups[3].samples, *groups[4].samples]
    [measured] = measured_samples(range(len(flat)), VERSION)
    with_gradient = [sample for group in groups[:3] for sample in group.samples if sample is not masked]
    counts = counted_one_by_one(path, [sequence for sample in with_gradient for sequence in sample])
    counts += len(flat) * counted_one_by_one(path, list(flat[measured]))
    expected = expert_stats(counts)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)
