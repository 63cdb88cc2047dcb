"""The optimizer by itself: what it takes from a checkpoint, and what from the recipe."""

import pytest
import torch

from penstock.errors import UserError
from services.trainer.backend.optimizer import ADAM_EPS, MAX_SKIPPED_STEPS, Optimizer, make_adamw, warmup_factor
from services.trainer.config import OptimizerConfig


def make(
    config: OptimizerConfig,
    weight: torch.Tensor,
    *,
    eps: float = ADAM_EPS,
    max_skipped_steps: int = MAX_SKIPPED_STEPS,
) -> tuple[Optimizer, torch.nn.Parameter]:
    """An optimizer over one matrix."""
    parameter = torch.nn.Parameter(weight.clone())
    adamw = make_adamw([parameter], config, eps=eps)
    return Optimizer(adamw, [parameter], config, max_skipped_steps=max_skipped_steps), parameter


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


def test_warm_up_goes_on_where_it_was() -> None:
    """With 3 steps of warm-up a quarter, a half; after a resume three quarters, then one."""
    assert [warmup_factor(step, 3) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_factor(0, 0) == 1
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3)
    rates: list[float] = []
    saved = None
    for _ in range(3):
        optimizer, parameter = make(config, torch.ones(2, 2))
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            parameter.grad = torch.ones(2, 2)
            rates.append(optimizer.update(0.0)["learning_rate"])
        saved = optimizer.state_dict()
    assert rates == [0.25, 0.5, 0.75, 1, 1, 1]


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
