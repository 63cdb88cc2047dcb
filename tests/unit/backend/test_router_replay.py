"""Router replay: tokens go through the experts that the engine chose, by the weights of the trainer's router.

The engine is a model of the same family here; `test_mixture_engine.py` has real SGLang.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.errors import InvalidRequestError
from services.trainer.backend.base import take_step
from services.trainer.backend.policy.experts.mixture import routers_of
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.ranks.ranks import ALONE
from services.trainer.batching.packing import Block, common_prefix_length
from services.trainer.batching.rows import PackedRow, build_row
from services.trainer.batching.sequences import TrainSequence, open_reader
from services.trainer.batching.shared_experts import with_shared_experts
from tests.support.trainer.families import EXPERTS, MIXTURES, heard, write_model
from tests.support.trainer.groups import make_group
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.support.trainer.routing import chosen_experts, disturb_routers, exchanged, recorded
from tests.unit.backend.ranks.test_ranks import backend_of

NUM_EXPERTS = EXPERTS["num_experts"]
ROUNDING = 0.02
"""Of a router's weights: some tokens choose other experts, and the weights of those that stay hardly change."""


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's folder."""
    made = heard(MIXTURES[request.param](), std_of_embedding=0.3)
    return write_model(made, tmp_path_factory.mktemp("models") / request.param)


def policy_of(path: Path, *, disturbed: float = 0.0, checkpointing: bool = False) -> PolicyModel:
    """The trainer's model."""
    policy = load_policy(path, temperature=1.0, forbidden_ids=(), gradient_checkpointing=checkpointing)
    if disturbed:
        disturb_routers(policy, disturbed)
    return policy


def samples_of(path: Path) -> list[TrainSequence]:
    """Samples of two groups with long answers, and of one with a picture if the model takes any."""
    reader = open_reader(path)
    plain = [reader.read(make_group(path, index=index, own_lengths=[30, 40, 50, 60]), {}) for index in (1, 2)]
    sequences = [*groups_of(path)[0].sequences, *plain[0].sequences, *plain[1].sequences]
    return [replace(sequence, routed_experts_RLK=None) for sequence in sequences]


ROWS = {
    "one by one": {"share": False},
    "shared prompts": {"share": True},
    "padded": {"share": True, "length": 1024},
}


def row_of(sequences: Sequence[TrainSequence], *, share: bool = True, length: int = 0) -> PackedRow:
    """A row of all samples, four to a group."""
    blocks = []
    for first in range(0, len(sequences), 4):
        numbers = tuple(range(first, first + 4))
        prefix = common_prefix_length([sequences[number] for number in numbers]) if share else 0
        blocks.append(Block(sequences=numbers, prefix_length=prefix))
    return build_row(sequences, tuple(blocks), length=length, with_experts=True)


@torch.no_grad()
def logprobs(policy: PolicyModel, row: PackedRow) -> torch.Tensor:
    """Of the row's own tokens."""
    return policy(row).logprobs_N


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest |dlogp|."""
    return float((one - other).abs().max())


@pytest.mark.parametrize("rows", ROWS)
def test_routers_that_choose_differently_take_what_the_engine_chose(path: Path, rows: str) -> None:
    """Log-probabilities that jumped are near the engine's again, however rows are built; wrong experts are felt."""
    engine, trainer = policy_of(path), policy_of(path, disturbed=ROUNDING)
    plain = samples_of(path)
    known = recorded(engine, plain)
    wanted = logprobs(engine, row_of(plain, **ROWS[rows]))
    off = distance(logprobs(trainer, row_of(plain, **ROWS[rows])), wanted)
    on = distance(logprobs(trainer, row_of(known, **ROWS[rows])), wanted)
    assert off > 1e-2
    assert on < off / 4, (on, off)
    assert distance(logprobs(trainer, row_of(exchanged(known, NUM_EXPERTS), **ROWS[rows])), wanted) > off


@pytest.mark.parametrize("rows", ROWS)
def test_the_routers_own_choice_changes_nothing(path: Path, rows: str) -> None:
    """Neither log-probabilities nor the gradient of any weight, the router's included."""
    plain = samples_of(path)
    found = []
    for sequences in (plain, recorded(policy_of(path), plain)):
        policy = policy_of(path)
        output = policy(row_of(sequences, **ROWS[rows])).logprobs_N
        output.sum().backward()
        gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
        assert all(router.weight.grad.abs().max() > 0 for router in routers_of(policy.model))
        found.append((output.detach(), gradients))
    (ours, gradients), (replayed, of_replayed) = found
    torch.testing.assert_close(replayed, ours, rtol=0, atol=2e-5)
    assert gradients.keys() == of_replayed.keys()
    for name, gradient in gradients.items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(of_replayed[name], gradient, rtol=0, atol=2e-4 * size, msg=name)


def test_the_weights_are_the_trainers_scores_of_the_replayed_experts(path: Path) -> None:
    """Their softmax over all experts, normalised over those of the token; the first token's are not known."""
    generator = torch.Generator().manual_seed(5)
    router = next(routers_of(policy_of(path).model))
    hidden = torch.randn(50, router.hidden_dim, generator=generator)
    scores, _, chosen = router(hidden)
    router.replayed_TK = torch.rand(50, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :2].to(torch.int16)
    router.replayed_TK[0] = -1
    _, weights, experts = router(hidden)
    assert torch.equal(experts[0], chosen[0])
    assert torch.equal(experts[1:], router.replayed_TK[1:].long())
    shares = scores.exp().gather(1, experts)
    torch.testing.assert_close(weights, shares / shares.sum(dim=1, keepdim=True))


def test_the_gradient_reaches_the_router_through_the_weights_of_the_replayed_experts(path: Path) -> None:
    """It is the slope of the log-probabilities, which do not jump where experts stay the same."""
    policy = policy_of(path, disturbed=ROUNDING)
    row = row_of(exchanged(recorded(policy_of(path), samples_of(path)), NUM_EXPERTS))
    policy(row).logprobs_N.sum().backward()
    router = list(routers_of(policy.model))[1]
    direction = router.weight.grad / router.weight.grad.norm()
    before, step = router.weight.detach().clone(), 1e-2
    sums = []
    for sign in (1, -1):
        with torch.no_grad():
            router.weight.copy_(before + sign * step * direction)
        sums.append(float(logprobs(policy, row).double().sum()))
    slope = (sums[0] - sums[1]) / (2 * step)
    assert slope == pytest.approx(float(router.weight.grad.norm()), rel=0.05)


def test_activations_that_are_computed_again_are_replayed_too(path: Path) -> None:
    """Otherwise the gradient would be that of other experts."""
    row = row_of(recorded(policy_of(path), samples_of(path)))
    found = []
    for checkpointing in (False, True):
        policy = policy_of(path, disturbed=10 * ROUNDING, checkpointing=checkpointing)
        policy(row).logprobs_N.sum().backward()
        found.append({name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None})
    kept, again = found
    assert kept.keys() == again.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_tokens_whose_experts_are_not_known_are_routed_by_the_trainer(path: Path) -> None:
    """A row of samples of which some tokens are known, and of one of which none is."""
    policy = policy_of(path)
    plain = samples_of(path)
    num_layers = len(policy.text_layers)
    numbers = np.random.default_rng(0).permuted(np.tile(np.arange(NUM_EXPERTS), (num_layers, 1)), axis=1)[:, :2]
    engines = np.broadcast_to(numbers, (1000, num_layers, 2)).astype(np.uint8)
    known = [replace(each, routed_experts_RLK=engines[:count]) for each, count in zip(plain, (0, 9, 20), strict=False)]
    row = build_row(known, [Block(sequences=(number,), prefix_length=0) for number in range(3)], with_experts=True)
    chosen = chosen_experts(policy, row)
    starts = [segment.start for segment in row.segments]
    for start, sequence in zip(starts, known, strict=True):
        count, end = sequence.num_routed, start + sequence.num_inputs
        assert (chosen[start : start + count] == engines[:count]).all()
        assert (chosen[start + count : end, 0] != engines[0, 0]).any()
    assert [sequence.num_routed for sequence in known] == [0, 9, 20]


def test_what_samples_begin_with_has_one_choice_of_experts(path: Path) -> None:
    """At each token that of the first sample with the same tokens up to there, of which it is known there."""
    reader = open_reader(path)
    group = reader.read(make_group(path, index=1, own_lengths=[8, 8, 8, 8]), {})
    first, second, third, fourth = group.sequences
    ids = third.token_ids_X.copy()
    ids[27:30] = second.token_ids_X[27:30]  # the third begins its answer like the second
    third = replace(third, token_ids_X=ids)
    shape = (34, len(policy_of(path).text_layers), 2)
    full = [np.full(shape, number, np.uint8) for number in range(4)]
    known = [replace(first, routed_experts_RLK=full[0][:10]), second, third, fourth]
    for number, count in ((1, 29), (2, 34), (3, 5)):
        known[number] = replace(known[number], routed_experts_RLK=full[number][:count])
    shared = with_shared_experts(replace(group, samples=tuple((each,) for each in known)))
    found = [sequence.routed_experts_RLK for sequence in shared.sequences]
    assert [None if each is None else each[:, 0, 0].tolist() for each in found] == [
        [0] * 10 + [1] * 17,
        [0] * 10 + [1] * 19 + [2],
        [0] * 10 + [1] * 19 + [2] * 5,
        [0] * 10 + [1] * 17,
    ]


def step_of(path: Path, *, groups: Any = None, **settings: Any) -> dict[str, float]:
    """Metrics of a step."""
    settings = {"micro_batch_tokens": 256, **settings}
    return take_step(backend_of(ALONE, path, **settings), [groups or groups_of(path)], VERSION)


def test_a_step_counts_what_it_replays(path: Path) -> None:
    """Every token of every sample, however rows are cut; without the setting nothing is replayed or counted."""
    groups = groups_of(path)[:3]
    off = step_of(path, groups=groups)
    assert "replayed_token_fraction" not in off
    alone = step_of(path, groups=groups, router_replay=True, share_prompts=False)
    sequences = [sequence for group in groups for sequence in with_shared_experts(group).sequences]
    routed, read = (sum(getattr(each, name) for each in sequences) for name in ("num_routed", "num_inputs"))
    assert alone["replayed_token_fraction"] == pytest.approx(routed / read)
    together = step_of(path, groups=groups, router_replay=True)
    assert together["replayed_token_fraction"] == alone["replayed_token_fraction"] < 1
    assert abs(together["loss"] - off["loss"]) > 1e-4


def test_rows_of_any_cut_replay_the_same(path: Path) -> None:
    """Loss and gradient are those of one row, up to the order of sums, with shared prompts and without."""
    wide = step_of(path, router_replay=True, micro_batch_tokens=8192, share_prompts=False)
    for settings in (
        {"micro_batch_tokens": 8192},
        {"micro_batch_tokens": 64},
        {"fixed_rows": True},
        {"gradient_checkpointing": True},
    ):
        found = step_of(path, router_replay=True, **settings)
        for name in ("loss", "grad_norm", "dlogp_mean", "max_vio_mean"):
            assert found[name] == pytest.approx(wide[name], rel=1e-3, abs=1e-6), (name, settings)


def test_the_reference_routes_by_itself(path: Path) -> None:
    """It has the policy's weights here: its distance is 0 only where both choose alike."""
    algorithm = {"kl": {"kind": "k3"}}
    assert step_of(path, algorithm=algorithm)["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert abs(step_of(path, algorithm=algorithm, router_replay=True)["kl_reference"]) > 1e-3


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (np.zeros((5, 9, 2), np.uint8), r"experts of shape \[9, 2\], and the model has \[\d, 2\]"),
        (None, r"experts 6 to 6, and the model has 6"),
    ],
)
def test_experts_of_another_model_are_refused(path: Path, experts: np.ndarray | None, reason: str) -> None:
    """They would be others' in silence."""
    if experts is None:
        experts = np.full((5, len(policy_of(path).text_layers), 2), 6, np.uint8)
    group = make_group(path, rewards=(1.0,))
    [sample] = group.samples
    [sequence] = sample.sequences
    changed = msgspec.structs.replace(sequence, routed_experts=experts)
    group = msgspec.structs.replace(group, samples=(msgspec.structs.replace(sample, sequences=(changed,)),))
    with pytest.raises(InvalidRequestError, match=reason):
        open_reader(path).read(group, {})
