"""On-policy distillation: the policy learns from a teacher's log-probabilities of its own tokens, and nothing else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import config as configuration
from penstock.config import load
from penstock.errors import ConfigError
from penstock.model.tokens import forbidden_token_ids
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.trainer.algorithm.axes import KlConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.plugin import load_function
from services.trainer.algorithm.regularisers import kl_penalty
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.conftest import ROOT
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.support.trainer.rows import row_of
from tests.support.trainer.teacher import write_teacher

COEF = 0.5


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples can be imported."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "algorithm")
    load_function.cache_clear()


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Of unequal rewards, the first with a picture."""
    return [replace(group, masked=()) for group in groups_of(tiny_model_path)[:3]]


@pytest.fixture(scope="module")
def teacher(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_teacher(tiny_model_path, tmp_path_factory.mktemp("teacher") / "model")


def loaded(path: Path) -> PolicyModel:
    """The model in a folder, which says what the policy says: at its temperature, without forbidden ids."""
    return load_policy(path, temperature=0.7, forbidden_ids=forbidden_token_ids(path))


def distilled(path: Path, teacher: Path, checkpoint: Path | None = None, **kl: Any) -> InProcessBackend:
    """A backend that learns from the teacher alone."""
    algorithm = {
        "preset": "ppo",
        "advantage": {"kind": "custom", "function": "own_axes:nothing"},
        "kl": {"kind": "k2", "coef": COEF, "reference": teacher, **kl},
    }
    config = BackendConfig(device="cpu", optimizer=OptimizerConfig(learning_rate=1e-3, grad_clip=1e9))
    axes = AlgorithmConfig.model_validate(algorithm)
    backend = InProcessBackend(path, config, axes, seed=0, temperature=0.7, max_skipped_steps=1)
    backend.load(checkpoint)
    return backend


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_gradient_is_that_of_the_distance_to_the_teacher(
    tiny_model_path: Path, teacher: Path, groups: list[TrainGroup], unbiased: bool
) -> None:
    """Of coef/tokens * sum w d^2/2 over all tokens, worked out with two models; rewards have no part in it."""
    student, said_by_teacher = loaded(tiny_model_path), loaded(teacher)
    sequences = [sequence for group in groups for sequence in group.sequences]
    num_tokens = sum(sequence.num_own_tokens for sequence in sequences)
    loss = 0.0
    for sequence in sequences:
        row = row_of(sequence)
        with torch.no_grad():
            reference_N = said_by_teacher(row).logprobs_N
        logprobs_N = student(row).logprobs_N
        weight_N = (logprobs_N.detach() - row.engine_logprobs_N).clamp(-20, 20).exp() if unbiased else 1.0
        value = COEF * (weight_N * (logprobs_N - reference_N).square() / 2).sum() / num_tokens
        value.backward()
        loss += float(value.detach())
    backend = distilled(tiny_model_path, teacher, unbiased=unbiased)
    metrics = take_step(backend, [groups], VERSION)
    assert metrics["policy_loss"] == 0
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["kl_loss"] == pytest.approx(loss, rel=1e-4)
    averages = backend._model.optimizer.state_dict()["averages"]
    expected = {name: weight.grad for name, weight in student.model.named_parameters() if weight.grad is not None}
    assert expected.keys() == averages.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(averages[name]["exp_avg"] * 10, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3_plus", "k3"])
def test_its_mean_over_the_engines_tokens_is_the_gradient_of_the_reverse_kl(kind: Any) -> None:
    """Of KL(policy || teacher) = sum p (log p - log t), for tokens that an older policy drew."""
    generator = torch.Generator().manual_seed(0)
    theta_V, engine_V, teacher_V = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    engine_V, teacher_V = engine_V.log_softmax(0), teacher_V.log_softmax(0)
    theta_V.requires_grad_()
    logprobs_V = theta_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - teacher_V)).sum(), theta_V)
    penalty_V = kl_penalty(theta_V.log_softmax(0), teacher_V, engine_V, KlConfig(kind=kind, unbiased=True))
    (found_V,) = torch.autograd.grad((engine_V.exp() * penalty_V).sum(), theta_V)
    torch.testing.assert_close(found_V, exact_V, rtol=1e-9, atol=1e-12)


def test_the_policy_comes_closer_to_the_teacher(
    tiny_model_path: Path, teacher: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """And goes on from a checkpoint with the same teacher, whose folder need not have it any more."""
    teacher = shutil.copytree(teacher, tmp_path / "teacher")
    backend = distilled(tiny_model_path, teacher)
    losses = [take_step(backend, [groups], VERSION)["kl_loss"] for _ in range(6)]
    assert losses[-1] < losses[0] / 2
    backend.save(tmp_path)
    shutil.rmtree(teacher)
    again = take_step(distilled(tiny_model_path, teacher, tmp_path), [groups], VERSION)["kl_loss"]
    assert again == pytest.approx(take_step(backend, [groups], VERSION)["kl_loss"], rel=1e-5)


def test_a_resumed_run_has_the_teacher_that_its_recipe_names(
    tiny_model_path: Path, teacher: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """One that is not the checkpoint's is read; a recipe that no longer names any is refused."""
    backend = distilled(tiny_model_path, teacher)
    take_step(backend, [groups], VERSION)
    backend.save(tmp_path)
    same, other = (
        take_step(distilled(tiny_model_path, each, tmp_path), [groups], VERSION)["kl_loss"]
        for each in (teacher, tiny_model_path)
    )
    assert same == pytest.approx(take_step(backend, [groups], VERSION)["kl_loss"], rel=1e-5)
    assert other != pytest.approx(same, rel=0.1)
    with pytest.raises(ConfigError, match=r"kl\.reference is not set, but the reference policy of .* is the model"):
        distilled(tiny_model_path, teacher, tmp_path, reference=None)


def test_a_teacher_of_other_sizes_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """With a weight that differs, and what to take instead."""
    shutil.copytree(tiny_model_path, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    changed = json.loads(file.read_text())
    changed["text_config"]["intermediate_size"] *= 2
    file.write_text(json.dumps(changed))
    from transformers import AutoConfig, AutoModelForImageTextToText

    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path / "other")).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(
        ConfigError, match=r"^algorithm\.kl\.reference = .*mlp.*instead of .*same architecture and sizes"
    ):
        distilled(tiny_model_path, tmp_path / "other")


def test_a_teacher_is_looked_at_before_engines_start(tiny_model_path: Path, tmp_path: Path) -> None:
    """It must be a model, with the same tokens."""
    assert service_settings.for_trainer(recipe_of(tiny_model_path, tiny_model_path)).algorithm.kl.reference
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.reference: .*has no config\.json"):
        service_settings.for_trainer(recipe_of(tiny_model_path, tmp_path))
    shutil.copytree(tiny_model_path, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    changed = json.loads(file.read_text())
    changed["added_tokens"][0]["id"] += 1000
    file.write_text(json.dumps(changed))
    (tmp_path / "other" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.reference: .*other ids than .*same tokenizer"):
        service_settings.for_trainer(recipe_of(tiny_model_path, tmp_path / "other"))


def recipe_of(model: Path, reference: Path) -> Recipe:
    """A run with a teacher."""
    return load(
        Recipe, [], [f"--model.path={model}", "--algorithm.kl.kind=k2", f"--algorithm.kl.reference={reference}"]
    )


def test_the_setting_survives_a_run_folder_and_stands_alone(tiny_model_path: Path, tmp_path: Path) -> None:
    """A run's config.toml reads back as the same; a refreshed teacher would be none."""
    recipe = recipe_of(tiny_model_path, tiny_model_path)
    (tmp_path / "config.toml").write_text(configuration.dump(recipe))
    assert load(Recipe, [tmp_path / "config.toml"]) == recipe
    with pytest.raises(ConfigError, match=r"refresh = 'copy' would replace reference"):
        load(Recipe, [], ["--algorithm.kl.kind=k2", "--algorithm.kl.reference=x", "--algorithm.kl.refresh=copy"])
    with pytest.raises(ConfigError, match=r"reference = .* has no effect with kind = 'none'"):
        load(Recipe, [], ["--algorithm.kl.reference=x"])
