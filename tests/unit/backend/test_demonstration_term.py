"""Demonstrations beside groups in one step: their gradient, which nothing but the weights decides, and bad steps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import UserError
from penstock.model.tokens import forbidden_token_ids
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig, OptimizerConfig
from services.trainer.sft.sequences import DemonstrationReader
from services.trainer.telemetry.gradient_streak import GradientStreak
from tests.support.trainer.data.pictures import png
from tests.support.trainer.data.sft import demonstration
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of

COEF = 0.25
"""A power of two, so that the factor itself rounds nothing."""
WHOLE = [[0, 1, 2, 3, 4]]
ONE_BY_ONE = [[0], [1], [2], [3], [4]]
ALL_REJECTED = {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}}

Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Three with a signal, the first with a picture, and two of equal rewards."""
    return groups_of(tiny_model_path)


@pytest.fixture(scope="module")
def learned(tiny_model_path: Path) -> list[TrainSequence]:
    """Text, two pictures, and a conversation of two answers."""
    reader = DemonstrationReader.open(tiny_model_path)
    examples = [
        demonstration("Say five.", "five, of course"),
        demonstration("<image>or<image>?", "the first", images=[png(size=(64, 96)), png("blue", size=(96, 96))]),
        demonstration("Say one.", "one", "And two?", "two"),
    ]
    return [reader.read(example) for example in examples]


def config_of(optimizer: dict[str, Any] | None = None, **settings: Any) -> BackendConfig:
    """Steps that are large enough to be seen, without a bound on the gradient."""
    return BackendConfig(
        device="cpu",
        optimizer=OptimizerConfig(**{"learning_rate": 1e-3, "grad_clip": 1e9, **(optimizer or {})}),
        **settings,
    )


def loaded(
    path: Path, *, coef: float | None = COEF, temperature: float = 0.7, algorithm: Any = None, **settings: Any
) -> InProcessBackend:
    """A backend that has loaded the model."""
    axes = AlgorithmConfig.model_validate(algorithm or {})
    backend = InProcessBackend(
        path,
        config_of(**settings),
        axes,
        seed=0,
        temperature=temperature,
        demonstration_coef=coef,
        max_skipped_steps=1,
    )
    backend.load(None)
    return backend


def step(
    backend: InProcessBackend,
    groups: list[TrainGroup],
    learned: Sequence[TrainSequence],
    cut: list[list[int]] = WHOLE,
) -> dict[str, float]:
    """The metrics of a step that is cut in this way."""
    return take_step(backend, [[groups[number] for number in chunk] for chunk in cut], VERSION, learned)


def gradients(backend: InProcessBackend | InProcessSupervisedBackend) -> Gradients:
    """The gradient that the first step applied, by name: AdamW's first average is a tenth of it."""
    averages = backend._model.optimizer.state_dict()["averages"]
    return {name: average["exp_avg"] * 10 for name, average in averages.items()}


def supervised(path: Path, learned: Sequence[TrainSequence], **settings: Any) -> tuple[Gradients, dict[str, float]]:
    """What `penstock sft` makes of the same demonstrations: gradient and metrics."""
    backend = InProcessSupervisedBackend(path, config_of(**settings), seed=0)
    backend.load(None)
    metrics = backend.step(learned)
    return gradients(backend), metrics


def assert_sum(found: Gradients, parts: Sequence[tuple[float, Gradients]]) -> None:
    """Every parameter's gradient is the weighted sum of the parts', within 1e-6 of their size."""
    assert found.keys() == set().union(*(part for _, part in parts))
    for name, gradient in found.items():
        terms = [factor * part[name].double() for factor, part in parts if name in part]
        size = sum(float(term.norm()) for term in terms)
        distance = float((gradient.double() - torch.stack(terms).sum(0)).norm())
        assert distance <= 1e-6 * size, (name, distance / size)


def weights(backend: InProcessBackend) -> Gradients:
    """A copy of them."""
    return {name: weight.clone() for name, weight in backend.export()}


def are_same(backend: InProcessBackend, before: Gradients) -> bool:
    """To the bit."""
    return all(torch.equal(weight, before[name]) for name, weight in backend.export())


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("cut", [WHOLE, ONE_BY_ONE, [[4, 3], [2], [1, 0]]], ids=str)
def test_the_gradient_is_that_of_the_groups_plus_coef_times_the_cross_entropys(
    tiny_model_path: Path,
    groups: list[TrainGroup],
    learned: list[TrainSequence],
    cut: list[list[int]],
    share_prompts: bool,
) -> None:
    """However the groups are cut; with a temperature of 0.7 and forbidden ids, which are the groups' alone."""
    alone = loaded(tiny_model_path, coef=None, share_prompts=share_prompts)
    of_groups = step(alone, groups, (), cut)
    of_demonstrations, sft = supervised(tiny_model_path, learned)
    mixed = loaded(tiny_model_path, share_prompts=share_prompts)
    metrics = step(mixed, groups, learned, cut)
    assert_sum(gradients(mixed), [(1.0, gradients(alone)), (COEF, of_demonstrations)])
    assert metrics["demonstration_cross_entropy"] == sft["loss"]
    assert metrics["demonstration_entropy"] == sft["entropy"]
    assert (metrics["num_demonstrations"], metrics["num_demonstration_tokens"]) == (3, sft["num_tokens"])
    assert metrics["ce_loss"] == COEF * sft["loss"]
    assert metrics["loss"] == pytest.approx(of_groups["loss"] + COEF * sft["loss"], rel=1e-6)
    assert metrics["num_tokens"] == of_groups["num_tokens"]


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"kl": {"kind": "k3", "coef": 0.1}, "entropy": {"kind": "bonus", "coef": 0.01}}},
        {"algorithm": {"preset": "m2po"}},
        {"algorithm": {"preset": "decoupled_ppo"}},
        {"micro_batch_tokens": 90},
        {"micro_batch_tokens": 256, "fixed_rows": True},
        {"gradient_checkpointing": True},
        {"optimizer": {"offload": True}},
        {"optimizer": {"learning_rates": {"tower": 0.0}}},
    ],
    ids=str,
)
def test_demonstrations_are_added_once_whatever_else_a_step_computes(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence], settings: dict[str, Any]
) -> None:
    """A reference, a batch that is waited for, rows of any size, weights on the host, frozen parts."""
    cut = [[4, 3], [2], [1, 0]]
    alone = loaded(tiny_model_path, coef=None, **settings)
    step(alone, groups, (), cut)
    of_demonstrations, _ = supervised(
        tiny_model_path, learned, **{name: value for name, value in settings.items() if name != "algorithm"}
    )
    mixed = loaded(tiny_model_path, **settings)
    step(mixed, groups, learned, cut)
    assert_sum(gradients(mixed), [(1.0, gradients(alone)), (COEF, of_demonstrations)])


def test_neither_temperature_nor_forbidden_ids_reach_the_cross_entropy(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Also where a demonstration says what the policy may never sample: its probability is the model's own."""
    forbidden = forbidden_token_ids(tiny_model_path)
    assert forbidden
    said = learned[0].token_ids_X.copy()
    said[learned[0].loss_mask_X.argmax()] = forbidden[0]
    shown = [replace(learned[0], token_ids_X=said), *learned[1:]]
    flat = groups[3:]
    of_demonstrations, sft = supervised(tiny_model_path, shown)
    assert math.isfinite(sft["loss"])
    for temperature in (0.2, 1.0, 3.0):
        backend = loaded(tiny_model_path, temperature=temperature)
        metrics = step(backend, flat, shown, [[0, 1]])
        assert metrics["demonstration_cross_entropy"] == sft["loss"]
        assert_sum(gradients(backend), [(COEF, of_demonstrations)])


@pytest.mark.parametrize("place", [0, 2])
def test_a_group_without_finite_numbers_leaves_the_demonstrations_as_they_are(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence], place: int
) -> None:
    """The gradient of the others is computed again, that of the demonstrations is added once."""
    [image] = groups[0].sequences[0].images
    broken = replace(image, pixel_values_PD=torch.full_like(image.pixel_values_PD, math.nan))
    bad = replace(groups[0], samples=tuple((replace(each, images=(broken,)),) for each in groups[0].sequences))
    cut = [[1, 3], [2, 4]]
    cut.insert(place, [0])
    alone, mixed = loaded(tiny_model_path, coef=None), loaded(tiny_model_path)
    step(alone, [bad, *groups[1:]], (), cut)
    metrics = step(mixed, [bad, *groups[1:]], learned, cut)
    assert (metrics["num_groups_skipped"], metrics["skipped"]) == (1, 0)
    assert_sum(gradients(mixed), [(1.0, gradients(alone)), (COEF, supervised(tiny_model_path, learned)[0])])


def test_a_batch_that_teaches_nothing_leaves_the_demonstrations_alone_to_learn(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Of equal rewards, or wholly rejected: demonstrations act where a regulariser would, and hide nothing."""
    of_demonstrations, _ = supervised(tiny_model_path, learned)
    flat = loaded(tiny_model_path)
    metrics = step(flat, groups[3:], learned, [[0], [1]])
    assert (metrics["skipped"], metrics["num_groups_without_gradient"]) == (0, 2)
    assert GradientStreak().observe(metrics) == {"num_steps_without_gradient": 1}
    assert_sum(gradients(flat), [(COEF, of_demonstrations)])
    rejected = loaded(tiny_model_path, algorithm=ALL_REJECTED)
    metrics = step(rejected, groups, learned)
    assert (metrics["skipped"], metrics["rejected_fraction"]) == (0, 1)
    assert GradientStreak().observe(metrics) == {"num_steps_without_gradient": 1}
    assert_sum(gradients(rejected), [(COEF, of_demonstrations)])
    assert step(loaded(tiny_model_path, algorithm=ALL_REJECTED), groups, ())["skipped"] == 1


def test_a_batch_of_broken_groups_skips_the_step_with_its_demonstrations(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """They would hide that nothing is trained any more; the second in a row ends the run."""
    backend = loaded(tiny_model_path)
    before = weights(backend)
    broken = [replace(group, rewards=(math.inf,) * len(group.samples)) for group in groups]
    metrics = step(backend, broken, learned)
    assert (metrics["skipped"], metrics["num_groups_skipped"]) == (1, 5)
    assert are_same(backend, before)
    with pytest.raises(UserError, match=r"2 steps in a row were skipped, .* no group has finite rewards"):
        step(backend, broken, learned)


def test_demonstrations_that_are_not_finite_skip_the_step(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Nothing of the groups is applied either; the next step is that of a backend which never saw them."""
    image = learned[1].images[0]
    broken = replace(image, pixel_values_PD=torch.full_like(image.pixel_values_PD, math.nan))
    bad = replace(learned[1], images=(broken, learned[1].images[1]))
    backend = loaded(tiny_model_path)
    before = weights(backend)
    with structlog.testing.capture_logs() as logs:
        metrics = step(backend, groups, [learned[0], bad])
    assert metrics["skipped"] == 1
    assert "loss nan" in logs[-1]["reason"]
    assert are_same(backend, before)
    fresh = loaded(tiny_model_path)
    for each in (backend, fresh):
        assert step(each, groups, learned)["skipped"] == 0
    assert are_same(backend, weights(fresh))


def test_pictures_of_demonstrations_alone_train_the_tower(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Without any picture it stays as it is, whatever weight decay says."""
    for shown, is_trained in ((learned, True), ([learned[0], learned[2]], False)):
        backend = loaded(tiny_model_path, optimizer={"weight_decay": 0.1})
        before = weights(backend)
        step(backend, groups[1:], shown, [[0, 1], [2, 3]])
        changed = {name for name, weight in backend.export() if not torch.equal(weight, before[name])}
        assert any("visual" in name for name in changed) is is_trained
        assert any("language_model" in name for name in changed)


def test_what_samples_share_is_a_share_of_samples(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Demonstrations have no group whose prompt they could share."""
    alone = step(loaded(tiny_model_path, coef=None), groups, [])
    together = step(loaded(tiny_model_path), groups, learned)
    assert together["shared_token_fraction"] == alone["shared_token_fraction"] > 0


def test_an_aborted_step_forgets_its_demonstrations(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """The next one learns none, or its own."""
    backend = loaded(tiny_model_path)
    backend.begin_step(VERSION)
    backend.accumulate(groups)
    backend.add_demonstrations(learned)
    backend.abort_step()
    step(backend, groups, ())
    without = loaded(tiny_model_path)
    step(without, groups, ())
    assert are_same(backend, weights(without))


def test_demonstrations_are_given_once_and_with_a_factor(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Anything else is an error of the caller."""
    backend = loaded(tiny_model_path)
    backend.begin_step(VERSION)
    backend.add_demonstrations(learned)
    with pytest.raises(ValueError, match="has demonstrations already"):
        backend.add_demonstrations(learned)
    with pytest.raises(ValueError, match="no factor for them"):
        step(loaded(tiny_model_path, coef=None), groups, learned)
