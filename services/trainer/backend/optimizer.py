"""AdamW with warm-up and a bound on the gradient's norm.

Invariants: weights and averages change only by a finite gradient. Every setting is the recipe's, also after a resume:
a checkpoint holds what AdamW has averaged and how many updates there were, never a learning rate.
"""

import math
from collections.abc import Mapping
from typing import Any

import structlog
import torch

from penstock.errors import UserError
from services.trainer.config import OptimizerConfig

log = structlog.get_logger()

ADAM_EPS = 1e-8
"""Added to AdamW's denominator, against division by zero: torch's default, and that of the published recipes."""
MAX_SKIPPED_STEPS = 3
"""One bad batch skips a step; more in a row come from weights that stay broken, and would go on until the end."""


class Optimizer:
    """Applies gradients to the weights."""

    def __init__(
        self,
        adamw: torch.optim.Optimizer,
        parameters: list[torch.nn.Parameter],
        config: OptimizerConfig,
        *,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
    ) -> None:
        """Use `adamw` from `make_adamw` over `parameters`."""
        self._adamw = adamw
        self._parameters = parameters
        self._config = config
        self._max_skipped_steps = max_skipped_steps
        self._num_updates = 0
        self._num_skipped_in_a_row = 0

    def update(self, loss: float, *, problem: str = "") -> dict[str, float]:
        """Apply the accumulated gradient if it and the loss are finite, clear it, and return metrics.

        Args:
            loss: Of the batch.
            problem: Why the gradient must not be applied although it is finite; empty if it may.

        Raises:
            UserError: more than `max_skipped_steps` updates in a row were not applied.
        """
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        learning_rate = self._config.learning_rate * warmup_factor(self._num_updates, self._config.warmup_steps)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            problem = f"loss {loss} and gradient norm {grad_norm}"
        if problem:
            self._skip(problem)
        else:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._num_updates += 1
            self._num_skipped_in_a_row = 0
            self.discard()
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped": float(bool(problem))}

    def discard(self) -> None:
        """Clear the accumulated gradient."""
        self._adamw.zero_grad(set_to_none=True)

    def _skip(self, problem: str) -> None:
        self.discard()
        self._num_skipped_in_a_row += 1
        log.warning("step.skipped", reason=problem, in_a_row=self._num_skipped_in_a_row)
        if self._num_skipped_in_a_row > self._max_skipped_steps:
            raise UserError(
                f"{self._num_skipped_in_a_row} steps in a row were skipped, the last one for: {problem}. Weights are "
                "as they were before them. Lower trainer.optimizer.learning_rate or trainer.max_staleness, or loosen "
                "the bounds in [algorithm], and resume from the last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` continues from: plain data and tensors."""
        return {
            "adamw": self._adamw.state_dict()["state"],
            "num_updates": self._num_updates,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the settings stay as they are."""
        # torch would take the checkpoint's learning rate, betas, eps and weight decay with its param_groups.
        self._adamw.load_state_dict({"state": state["adamw"], "param_groups": self._adamw.state_dict()["param_groups"]})
        self._num_updates = state["num_updates"]
        self._num_skipped_in_a_row = state["num_skipped_in_a_row"]


def make_adamw(
    parameters: list[torch.nn.Parameter], config: OptimizerConfig, *, eps: float = ADAM_EPS
) -> torch.optim.AdamW:
    """Return AdamW over `parameters`, with weight decay on matrices only, not on norms and biases."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=eps)


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the factor on the learning rate of update `step`, from 0: linear to 1, then constant."""
    return min(1.0, (step + 1) / (warmup_steps + 1))
