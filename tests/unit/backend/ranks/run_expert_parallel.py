"""Ranks that divide the experts of a mixture take the steps of one."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.model.families.experts import num_experts
from services.trainer.backend.policy.experts.expert_dispatch import divide_experts
from services.trainer.backend.policy.experts.mixture import experts_of, set_mixture_precision
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.checks.expert_parallel import require_divisible
from services.trainer.config import TrainerConfig
from tests.support.trainer.checkpoints import averages_of as averages_in
from tests.support.trainer.families import MIXTURES, heard, random_qwen3_moe, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.run_sequence_parallel import supervised
from tests.unit.backend.ranks.test_mixed_precision import ROWS as BFLOAT16_ROWS
from tests.unit.backend.ranks.test_ranks import assert_same, backend_of, steps_of, trained, weights_of
from tests.unit.backend.ranks.test_sequence_parallel import require_same_gradients

NUM_EXPERTS = 12
"""What 2 and 4 ranks divide; 4 ranks of which 2 own the same 6 experts hold 3 each, or all 12 if each owns 3."""


@pytest.fixture(scope="module", params=MIXTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 6 experts, whose matrices are not square."""
    made = heard(MIXTURES[request.param](), std_of_embedding=0.3)
    return write_model(made, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of 12 experts."""
    made = heard(random_qwen3_moe(num_experts=NUM_EXPERTS), std_of_embedding=0.3)
    return write_model(made, tmp_path_factory.mktemp("models") / "text")


SETTINGS: dict[str, dict[str, Any]] = {
    "short rows": {"micro_batch_tokens": 90},
    "fewer rows than ranks": {"micro_batch_tokens": 8192},
    "checkpointing": {"gradient_checkpointing": True, "micro_batch_tokens": 90},
    "frozen text": {"micro_batch_tokens": 90, "optimizer": {"learning_rates": {"text": 0.0}}},
    "frozen experts": {"micro_batch_tokens": 90, "optimizer": {"learning_rates": {"*.experts.*": 0.0}}},
    "router replay": {"micro_batch_tokens": 90, "router_replay": True, "gradient_checkpointing": True},
    "clipped": {"micro_batch_tokens": 90, "optimizer": {"grad_clip": 1e-3, "weight_decay": 0.1}},
    "offload": {"micro_batch_tokens": 90, "optimizer": {"offload": True, "weight_decay": 0.1}},
    "reference": {"micro_batch_tokens": 90, "algorithm": {"kl": {"kind": "k3", "refresh": "ema", "refresh_every": 1}}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_with_half_of_the_experts_each_take_the_steps_of_one(two: RankPool, model: Path, name: str) -> None:
    """Loss, norm of the gradient over both kinds of shards, and weights."""
    if name == "frozen text" and "vl" not in model.name:
        pytest.skip("nothing but text")
    alone = trained(ALONE, model, copy.deepcopy(SETTINGS[name]), range(3))
    for together in two.run(trained, model, SETTINGS[name] | {"expert_parallel": 2}, range(3)):
        assert_same(alone, together)


@pytest.mark.parametrize("name", ["short rows", "checkpointing"])
def test_four_ranks_hold_shards_of_half_of_the_experts(four: RankPool, model: Path, name: str) -> None:
    """Three experts in shards of two and of one."""
    alone = trained(ALONE, model, dict(SETTINGS[name]), range(3))
    for together in four.run(trained, model, SETTINGS[name] | {"expert_parallel": 2}, range(3)):
        assert_same(alone, together)


TWENTY: dict[str, Any] = {"micro_batch_tokens": 90, "optimizer": {"learning_rate": 1e-4}}


@pytest.mark.parametrize(
    ("divides", "offload"),
    [(True, False), (True, True), (False, False)],
    ids=["divided experts", "divided experts, offloaded", "sharded experts"],
)
@pytest.mark.parametrize("kind", MIXTURES)
def test_after_twenty_steps_of_a_mixture_ranks_are_where_one_is(
    two: RankPool, four: RankPool, tmp_path: Path, kind: str, divides: bool, offload: bool
) -> None:
    """Loss, norm of the gradient and weights, on one, two and four ranks: with experts that each owns some of, in the
    host's memory too, and with shards of all of them."""
    path = write_model(heard(MIXTURES[kind](num_experts=NUM_EXPERTS), std_of_embedding=0.3), tmp_path / kind)
    alone = trained(ALONE, path, dict(TWENTY), range(20))
    for pool, num_ranks in ((two, 2), (four, 4)):
        settings = TWENTY | {"optimizer": TWENTY["optimizer"] | {"offload": offload}}
        settings |= {"expert_parallel": num_ranks} if divides else {}
        assert_same(alone, pool.run(trained, path, settings, range(20))[0], atol=2e-6)


def averages_of(ranks: Ranks, path: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """AdamW's first averages after a step, of which each is a tenth of the gradient: those that the rank writes."""
    backend = backend_of(ranks, path, **settings)
    steps_of(backend, path, [0])
    owned = backend.collect().tensors["optimizer"].owned
    return {name: tensor for name, tensor in owned.items() if name.endswith(".exp_avg")}


@pytest.mark.parametrize("offload", [False, True], ids=["held", "offloaded"])
@pytest.mark.parametrize("expert_parallel", [2, 4])
def test_the_gradient_of_each_expert_is_that_of_one_rank(
    four: RankPool, text_model: Path, expert_parallel: int, offload: bool
) -> None:
    """A plain sum, whether ranks share their experts or not."""
    settings = {"micro_batch_tokens": 90, "optimizer": {"offload": offload}}
    alone = averages_of(ALONE, text_model, dict(settings))
    shares = four.run(averages_of, text_model, settings | {"expert_parallel": expert_parallel})
    together = {name: tensor for share in shares for name, tensor in share.items()}
    assert alone.keys() == together.keys()
    for name, expected in alone.items():
        size = expected.abs().max()
        torch.testing.assert_close(
            together[name],
            expected,
            rtol=0,
            atol=float(2e-5 * size),
            msg=lambda text, name=name: name + text,
        )


@pytest.mark.parametrize("expert_parallel", [2, 4])
def test_weights_are_exported_as_they_were_loaded(four: RankPool, text_model: Path, expert_parallel: int) -> None:
    """Each expert in its place, on every rank."""
    expected = weights_of(backend_of(ALONE, text_model))
    for weights in four.run(loaded, text_model, expert_parallel):
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def loaded(ranks: Ranks, path: Path, expert_parallel: int) -> dict[str, torch.Tensor]:
    """The weights before any step, with the shapes that were announced."""
    backend = backend_of(ranks, path, expert_parallel=expert_parallel)
    weights = weights_of(backend)
    announced = {spec.name: spec.shape for spec in backend.export().specs}
    assert announced == {name: tuple(weight.shape) for name, weight in weights.items()}
    return weights


def test_an_exchanged_pair_of_experts_is_felt(two: RankPool, model: Path, tmp_path: Path) -> None:
    """The tests above would notice if tokens went to another expert than the one that was chosen."""
    settings = {"micro_batch_tokens": 90, "expert_parallel": 2}
    made = heard(MIXTURES[model.name](), std_of_embedding=0.3)
    with torch.no_grad():
        for parameter in next(experts_of(made)).parameters():
            parameter[[1, 4]] = parameter[[4, 1]].clone()
    exchanged = write_model(made, tmp_path / model.name)
    before, after = (two.run(trained, path, settings)[0] for path in (model, exchanged))
    with pytest.raises(AssertionError):
        assert_same(({}, before[1]), ({}, after[1]))


def saved(ranks: Ranks, path: Path, checkpoint: Path | None, folder: Path, seed: int, expert_parallel: int) -> str:
    """The digest of the weights after a step from a checkpoint, of which the ranks write another."""
    algorithm = {"kl": {"kind": "k3", "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5}}
    backend = backend_of(ranks, path, checkpoint, algorithm=algorithm, expert_parallel=expert_parallel)
    steps_of(backend, path, [seed])
    collected = backend.collect()
    if ranks.rank == 0:
        folder.mkdir()
    ranks.gather(None)
    backend.write(collected, folder)
    ranks.gather(None)
    return backend.digests().weights


def test_a_checkpoint_is_of_no_division_of_experts(four: RankPool, text_model: Path, tmp_path: Path) -> None:
    """What one division has saved any other continues, averages and reference policy included."""
    saved(ALONE, text_model, None, tmp_path / "first", 0, 1)
    saved(ALONE, text_model, tmp_path / "first", tmp_path / "expected", 1, 1)
    expected = averages_in(tmp_path / "expected")
    for before, after in ((4, 2), (2, 1), (1, 4)):
        first, second = tmp_path / f"of {before}", tmp_path / f"of {before}, then {after}"
        assert len(set(four.run(saved, text_model, None, first, 0, before))) == 1
        assert len(set(four.run(saved, text_model, first, second, 1, after))) == 1
        found = averages_in(second)
        assert found.keys() == expected.keys()
        for name, averages in expected.items():
            for key, value in averages.items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-3, atol=1e-6)
        assert_same(
            (weights_of(backend_of(ALONE, text_model, tmp_path / "expected")), []),
            (weights_of(backend_of(ALONE, text_model, second)), []),
        )


def test_a_supervised_step_is_that_of_one_rank(two: RankPool, model: Path) -> None:
    """Its gradient, loss and entropy, and the loss that was measured before it."""
    require_same_gradients(supervised(ALONE, model, {}), two.run(supervised, model, {"expert_parallel": 2}))


def test_bfloat16_gradients_are_those_of_one_rank(two: RankPool, model: Path) -> None:
    """Of the same rows. Experts compute theirs from the tokens of all ranks at once, and so round another sum."""
    alone = averages_of(ALONE, model, dict(BFLOAT16_ROWS))
    shares = two.run(averages_of, model, BFLOAT16_ROWS | {"expert_parallel": 2})
    together = {name: tensor for share in shares for name, tensor in share.items()}
    assert alone.keys() == together.keys()
    for name, expected in alone.items():
        error = (together[name] - expected).norm() / expected.norm()
        assert error < (5e-3 if ".experts." in name else 2e-5), (name, error)


LENGTHS = (5, 1, 9, 2)
"""Tokens of each rank's row."""
CHOICES = {
    "any": lambda generator, num_tokens: torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2).indices,
    "of one owner": lambda generator, num_tokens: torch.rand(num_tokens, 3, generator=generator).topk(2).indices + 6,
    "one expert": lambda generator, num_tokens: torch.tensor([[11, 3]] * num_tokens),
}


def inputs_of(rank: int, choice: str, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """A rank's tokens, their experts and weights, and a gradient of the output."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = LENGTHS[rank]
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, requires_grad=True)
    weights = torch.rand(num_tokens, 2, generator=generator, requires_grad=True)
    return hidden, CHOICES[choice](generator, num_tokens), weights, torch.randn(hidden.shape, generator=generator)


def computed(experts: Any, rank: int, choice: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The output of a rank's tokens and the gradients of its inputs; adds to those of the experts."""
    hidden, chosen, weights, gradient = inputs_of(rank, choice, experts.hidden_dim)
    output = experts(hidden, chosen, weights)
    output.backward(gradient)
    return output.detach(), hidden.grad, weights.grad


def mixture() -> Any:
    """A model whose first layer's experts are used."""
    made = heard(random_qwen3_moe(num_experts=NUM_EXPERTS, num_hidden_layers=1))
    set_mixture_precision(made)
    return made


class _Policy:
    def __init__(self, model: Any) -> None:
        self.model = model


def dispatched(ranks: Ranks, choice: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Outputs and gradients of this rank's tokens, and those of its own experts."""
    groups = ranks.expert_groups(4)
    assert groups is not None
    [experts] = divide_experts(_Policy(mixture()), groups)
    found = computed(experts, ranks.rank, choice)
    return found, {name: parameter.grad for name, parameter in experts.named_parameters()}


@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_find_their_experts_whatever_is_chosen(four: RankPool, choice: str) -> None:
    """Nothing is dropped, and owners that nobody chose, or that get everything, go back as the others do."""
    [experts] = experts_of(mixture())
    expected = [computed(experts, rank, choice) for rank in range(4)]
    for rank, (found, gradients) in enumerate(four.run(dispatched, choice)):
        for ours, theirs in zip(expected[rank], found, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
        for name, parameter in experts.named_parameters():
            own = parameter.grad.chunk(4)[rank]
            torch.testing.assert_close(
                gradients[name], own, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
            )
            assert choice == "any" or (own.abs().sum() > 0) == (
                rank == 2 if choice == "of one owner" else rank in (1, 3)
            )


@pytest.mark.parametrize(
    ("expert_parallel", "num_ranks", "num_experts", "problem"),
    [
        (2, 2, 0, r"trainer\.expert_parallel = 2 is for mixtures .* dense model; leave it out"),
        (4, 4, 6, r"trainer\.expert_parallel = 4 does not divide the model's 6 experts; choose"),
        (2, 3, 6, r"trainer\.expert_parallel = 2 does not divide the trainer's ranks, .* are 3; .* trainer\.ranks"),
        (2, 1, 6, r"trainer\.expert_parallel = 2 does not divide the trainer's ranks, of which there is 1;"),
        (8, 4, 128, r"trainer\.expert_parallel = 8 does not divide the trainer's ranks, .* are 4;"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    expert_parallel: int, num_ranks: int, num_experts: int, problem: str
) -> None:
    """With the numbers, and the setting to change."""
    with pytest.raises(ConfigError, match=problem):
        require_divisible(expert_parallel, num_ranks=num_ranks, num_experts=num_experts)


def test_a_recipe_whose_ranks_cannot_divide_experts_is_refused() -> None:
    """When it is read."""
    with pytest.raises(ValueError, match=r"expert_parallel = 3 does not divide ranks = 4; choose a number that does"):
        TrainerConfig(ranks=4, expert_parallel=3)
    assert TrainerConfig(ranks=1, expert_parallel=8).expert_parallel == 8  # torchrun may start 8


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_moe"])
def test_the_experts_of_a_folder_are_counted(tmp_path: Path, kind: str, key: str) -> None:
    """As published, and as transformers writes a config again."""
    text = {key: 128}
    config = {"model_type": kind} | ({"text_config": text} if "vl" in kind else text)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert num_experts(tmp_path) == 128
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    assert num_experts(tmp_path) == 0
