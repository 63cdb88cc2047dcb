"""The optimizer by itself: what it takes from a checkpoint, what from the recipe, and where its state is."""

from collections.abc import Mapping

import pytest
import torch

from penstock.errors import UserError
from services.trainer.backend.optimizer.adamw import ADAM_EPS, MAX_SKIPPED_STEPS, Optimizer
from services.trainer.backend.optimizer.master_weights import CopiedMasterWeights, MasterWeights
from services.trainer.config import OptimizerConfig


def make(
    config: OptimizerConfig,
    weight: torch.Tensor,
    *,
    eps: float = ADAM_EPS,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
) -> tuple[Optimizer, torch.nn.Parameter]:
    """An optimizer over one matrix."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(weight.clone())})
    optimizer = optimizer_of(
        MasterWeights(dict(model.named_parameters())), config, eps=eps, max_skipped_steps=max_skipped_steps
    )
    return optimizer, model["weight"]


def optimizer_of(
    weights: MasterWeights,
    config: OptimizerConfig,
    *,
    rates: Mapping[str, float] | None = None,
    is_fused: bool = False,
    eps: float = ADAM_EPS,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
) -> Optimizer:
    """One with the same rate for all weights but those in `rates`."""
    rates = dict.fromkeys(weights.trained, config.learning_rate) | dict(rates or {})
    return Optimizer(
        weights, rates, config, num_updates=10, is_fused=is_fused, eps=eps, max_skipped_steps=max_skipped_steps
    )


def make_model() -> torch.nn.Module:
    """A matrix and a bias, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_resumes_with_the_recipes_settings_and_the_checkpoints_averages() -> None:
    """AdamW by hand: averages of the first update, everything else from the recipe of the second."""
    first_gradient = torch.tensor([[0.3, -0.1], [0.2, 0.4]])
    second_gradient = torch.tensor([[-0.2, 0.5], [0.1, 0.3]])
    old = OptimizerConfig(learning_rate=1e-1, betas=(0.5, 0.6), warmup_steps=3, grad_clip=100)
    optimizer, parameter = make(old, torch.ones(2, 2), eps=1e-3)
    parameter.grad = first_gradient.clone()
    assert optimizer.update(0.0)["learning_rate"] == 1e-1 / 4
    saved, weight = optimizer.state_dict(), parameter.detach().clone()

    recipe = OptimizerConfig(learning_rate=2e-3, betas=(0.8, 0.9), weight_decay=0.5, warmup_steps=7, grad_clip=100)
    resumed, parameter = make(recipe, weight, eps=1e-2)
    resumed.load_state_dict(saved)
    parameter.grad = second_gradient.clone()
    rate = resumed.update(0.0)["learning_rate"]

    assert rate == pytest.approx(2e-3 * 2 / 8)
    average = 0.8 * (0.5 * first_gradient) + 0.2 * second_gradient
    square = 0.9 * (0.4 * first_gradient**2) + 0.1 * second_gradient**2
    direction = (average / (1 - 0.8**2)) / ((square / (1 - 0.9**2)).sqrt() + 1e-2)
    torch.testing.assert_close(parameter.detach(), weight * (1 - rate * 0.5) - rate * direction)


def test_the_schedule_goes_on_where_it_was() -> None:
    """Two updates before each of two resumes, a skipped step among them, give the rates of six in a row."""
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 3, "schedule": {"kind": "linear", "min_ratio": 0.2}}
    )
    rates: list[float] = []
    saved = None
    for _ in range(3):
        optimizer, parameter = make(config, torch.ones(2, 2))
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            parameter.grad = torch.ones(2, 2)
            rates.append(optimizer.update(0.0)["learning_rate"])
        assert optimizer.update(float("nan"))["skipped"] == 1
        saved = optimizer.state_dict()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1 - 0.8 / 7, 1 - 1.6 / 7])


def test_a_row_of_skipped_updates_goes_on_over_a_resume() -> None:
    """One before the checkpoint and one after it are two in a row."""
    config = OptimizerConfig()
    optimizer, _ = make(config, torch.ones(2, 2), max_skipped_steps=1)
    assert optimizer.update(float("nan"))["skipped"] == 1
    resumed, parameter = make(config, torch.ones(2, 2), max_skipped_steps=1)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(UserError, match="2 steps in a row were skipped, the last one for: loss inf"):
        resumed.update(float("inf"))
    assert torch.equal(parameter.detach(), torch.ones(2, 2))


def test_parts_have_rates_of_their_own_and_averages_by_name() -> None:
    """The first update of AdamW is the sign of the gradient times the rate; then a weight is frozen, then trained."""
    config = OptimizerConfig(learning_rate=1.0, learning_rates={"bias": 0.25}, grad_clip=1e9)

    def updated(model: torch.nn.Module, state: dict[str, object] | None) -> Optimizer:
        optimizer = optimizer_of(MasterWeights(dict(model.named_parameters())), config, rates={"bias": 0.25})
        if state is not None:
            optimizer.load_state_dict(state)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0) if parameter.requires_grad else None
        metrics = optimizer.update(0.0)
        assert (metrics["learning_rate"], metrics["learning_rate_bias"]) == (1.0, 0.25)
        return optimizer

    model = make_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    whole = updated(model, None).state_dict()
    torch.testing.assert_close(model.weight.detach(), before["weight"] - 1.0)
    torch.testing.assert_close(model.bias.detach(), before["bias"] - 0.25)

    frozen = make_model()
    frozen.weight.requires_grad_(False)
    part = updated(frozen, whole).state_dict()
    assert torch.equal(frozen.weight.detach(), before["weight"])
    assert set(part["averages"]) == {"bias"}
    assert part["averages"]["bias"]["step"] == 2

    again = make_model()
    averages = updated(again, part).state_dict()["averages"]
    assert (averages["bias"]["step"], averages["weight"]["step"]) == (3, 1)


def test_fused_updates_are_those_of_the_loop() -> None:
    """Weights and averages after five updates, up to the last bits: two rates, decay, a clipped norm, and a resume."""
    config = OptimizerConfig(learning_rate=1e-2, learning_rates={"bias": 1e-3}, weight_decay=0.1, grad_clip=0.5)
    results = []
    for is_fused in (False, True):
        model, state = make_model(), None
        generator = torch.Generator().manual_seed(1)
        for num_updates in (2, 3):
            weights = MasterWeights(dict(model.named_parameters()))
            optimizer = optimizer_of(weights, config, rates={"bias": 1e-3}, is_fused=is_fused, eps=1e-3)
            if state is not None:
                optimizer.load_state_dict(state)
            for _ in range(num_updates):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.update(0.0)
            state = optimizer.state_dict()
        assert all(group["fused"] is (is_fused or None) for group in optimizer._adamw.param_groups)
        results.append((dict(weights.named()), state["averages"]))
    (looped, averages_of_loop), (fused, averages_of_fused) = results
    torch.testing.assert_close(fused, looped, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(averages_of_fused, averages_of_loop, rtol=1e-6, atol=1e-8)


def copied(model: torch.nn.Module, dtype: torch.dtype) -> CopiedMasterWeights:
    """float32 weights beside a model that computes in `dtype`."""
    cpu = torch.device("cpu")
    return CopiedMasterWeights(dict(model.named_parameters()), device=cpu, dtype=dtype, copies_on=cpu)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_weights_on_the_host_are_updated_to_the_same_bits(num_passes: int) -> None:
    """Gradients of several backward passes, a tied weight, a clipped norm: five updates, every bit equal."""
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, grad_clip=0.5)
    results = []
    for is_on_host in (False, True):
        model = make_model()
        weights = copied(model, torch.float32) if is_on_host else MasterWeights(dict(model.named_parameters()))
        optimizer = optimizer_of(weights, config)
        generator = torch.Generator().manual_seed(1)
        norms = []
        for _ in range(5):
            for _ in range(num_passes):
                inputs = torch.randn(4, 3, generator=generator)
                (model(inputs).tanh() @ model.weight).square().sum().backward()
            norms.append(optimizer.update(0.0)["grad_norm"])
        for name, parameter in model.named_parameters():
            assert torch.equal(dict(weights.named())[name], parameter.detach())
        results.append((norms, [weight.clone() for _, weight in weights.named()]))
    (plain_norms, plain), (host_norms, host) = results
    assert host_norms == plain_norms
    assert all(torch.equal(one, other) for one, other in zip(plain, host, strict=True))


def test_small_updates_are_not_lost_where_the_model_computes_in_bfloat16() -> None:
    """A step of 2^-12 vanishes beside 1 in bfloat16; the float32 weight on the host collects sixteen of them."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(2, 2))})
    weights = copied(model, torch.bfloat16)
    optimizer = optimizer_of(weights, OptimizerConfig(learning_rate=2**-12, betas=(0.0, 0.0)))
    seen = []
    for _ in range(16):
        model["weight"].sum().backward()
        assert model["weight"].grad is None
        optimizer.update(0.0)
        seen.append(float(model["weight"][0, 0].detach()))
    assert seen[0] == 1.0
    assert seen[-1] == 1 - 2**-8
    assert dict(weights.named())["weight"].dtype == torch.float32
