"""AdamW with a schedule, separate learning rates for parts of the model, and a bound on the gradient's norm.

Invariants: weights and averages change only by a finite gradient. Every setting is the recipe's, also after a resume:
a checkpoint holds AdamW's averages and the number of updates, never a learning rate.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import structlog
import torch

from penstock.errors import UserError
from penstock.model.families.qwen_vl import part_of
from services.trainer.backend.optimizer.master_weights import MasterWeights
from services.trainer.backend.optimizer.schedule import rate_factor
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.config import OptimizerConfig

log = structlog.get_logger()

ADAM_EPS = 1e-8
"""Added to AdamW's denominator, against division by zero: torch's default, and that of the published recipes."""
MAX_SKIPPED_STEPS = 3
"""Most skipped steps in a row. One bad batch skips a step; more in a row come from weights that stay broken."""
REMEDY = "Lower trainer.optimizer.learning_rate or trainer.max_staleness, or loosen the bounds in [algorithm]"
"""What a person can do where steps are skipped and nothing better is known."""


class Optimizer:
    """Applies gradients to the weights."""

    def __init__(
        self,
        weights: MasterWeights,
        rates: Mapping[str, float],
        config: OptimizerConfig,
        *,
        num_updates: int,
        is_fused: bool = False,
        eps: float = ADAM_EPS,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        ranks: Ranks = ALONE,
    ) -> None:
        """Create AdamW over the trained weights.

        Args:
            weights: Master weights, in which gradients are summed.
            rates: Learning rate of each trained weight after warm-up, by name.
            config: AdamW, its schedule, and the bound on the gradient's norm.
            num_updates: Updates of the whole run.
            is_fused: Use torch's fused kernels. Their last bits differ from those of the plain loop.
            eps: Added to AdamW's denominator.
            max_skipped_steps: More skipped updates in a row than this are an error.
            ranks: The ranks that hold a shard of the weights.
        """
        self._ranks = ranks
        self._weights = weights
        self._trained = weights.trained
        self._config = config
        self._num_updates_of_run = num_updates
        self._max_skipped_steps = max_skipped_steps
        groups = _param_groups(self._trained, rates, config)
        self._names = [name for group in groups for name in group["names"]]
        self._adamw = torch.optim.AdamW(
            [{"params": [self._trained[name] for name in group.pop("names")], **group} for group in groups],
            lr=config.learning_rate,
            betas=config.betas,
            eps=eps,
            fused=is_fused or None,  # None is torch's own choice, a loop on CPUs
        )
        self._num_updates = 0
        self._num_skipped_in_a_row = 0

    def update(self, loss: float, *, problem: str = "", remedy: str = REMEDY) -> dict[str, float]:
        """Apply the accumulated gradient if it and the loss are finite, clear it, and return metrics.

        Args:
            loss: Loss of the batch.
            problem: Why a finite gradient must not be applied; empty if it may.
            remedy: What a person can do about the problem if it stays: an imperative without a full stop.

        Raises:
            UserError: more than `max_skipped_steps` updates in a row were not applied.
        """
        grad_norm = self._clip()
        factor = rate_factor(self._num_updates, self._config, num_updates=self._num_updates_of_run)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            problem = f"loss {loss} and gradient norm {grad_norm}"
        if problem:
            self._skip(problem, remedy)
        else:
            for group in self._adamw.param_groups:
                group["lr"] = group["full_rate"] * factor
            self._adamw.step()
            self._weights.updated()
            self._num_updates += 1
            self._num_skipped_in_a_row = 0
            self.discard()
        rates = {"learning_rate": self._config.learning_rate}
        rates |= {f"learning_rate_{pattern}": rate for pattern, rate in self._config.learning_rates.items()}
        return {
            "grad_norm": grad_norm,
            "skipped": float(bool(problem)),
            "num_updates": float(self._num_updates),
            **{name: rate * factor for name, rate in rates.items()},
        }

    def _clip(self) -> float:
        """Scale the gradient down to the largest allowed norm; return its norm before."""
        gradients = [weight.grad for weight in self._trained.values() if weight.grad is not None]
        norm = self._ranks.norm(torch.nn.utils.get_total_norm(gradients))
        if gradients:
            torch._foreach_mul_(gradients, (self._config.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def scale(self, factor: float) -> None:
        """Multiply the accumulated gradient."""
        if gradients := [weight.grad for weight in self._trained.values() if weight.grad is not None]:
            torch._foreach_mul_(gradients, factor)

    def discard(self) -> None:
        """Clear the accumulated gradient."""
        self._adamw.zero_grad(set_to_none=True)

    def discard_parts(self, parts: Collection[str]) -> None:
        """Clear the gradient of parts of the model that the batch did not use, so that they stay unchanged."""
        for name, weight in self._trained.items():
            if part_of(name) in parts:
                weight.grad = None

    def _skip(self, problem: str, remedy: str) -> None:
        self.discard()
        self._num_skipped_in_a_row += 1
        log.warning("step.skipped", reason=problem, in_a_row=self._num_skipped_in_a_row)
        if self._num_skipped_in_a_row > self._max_skipped_steps:
            raise UserError(
                f"{self._num_skipped_in_a_row} steps in a row were skipped, the last one for: {problem}. Weights are "
                f"as they were before them. {remedy}, and resume from the last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`: plain data and tensors, shaped like this rank's shards.

        The tensors are the optimizer's own, which the next update changes.
        """
        averages = self._adamw.state_dict()["state"]
        return {
            "averages": {self._names[number]: dict(state) for number, state in averages.items()},
            "num_updates": self._num_updates,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; the settings do not change.

        A weight that was frozen before begins with zero averages; averages of a weight that is now frozen are dropped.
        """
        averages: Mapping[str, Any] = state["averages"]
        started = sorted(set(self._names) - set(averages)) if averages else []
        dropped = sorted(set(averages) - set(self._names))
        if started or dropped:
            log.info(
                "averages.changed", num_started=len(started), num_dropped=len(dropped), names=(started + dropped)[:4]
            )
        self._adamw.load_state_dict(
            {
                "state": {number: averages[name] for number, name in enumerate(self._names) if name in averages},
                # The checkpoint's param_groups would bring its learning rate, betas, eps and weight decay.
                "param_groups": self._adamw.state_dict()["param_groups"],
            }
        )
        self._num_updates = state["num_updates"]
        self._num_skipped_in_a_row = state["num_skipped_in_a_row"]


def _param_groups(
    trained: Mapping[str, torch.nn.Parameter], rates: Mapping[str, float], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return one group per learning rate and weight decay: matrices decay, norms and biases do not."""
    groups: dict[tuple[float, bool], list[str]] = {}
    for name, parameter in sorted(trained.items(), key=lambda item: item[1].ndim < 2):
        groups.setdefault((rates[name], parameter.ndim >= 2), []).append(name)
    return [
        {"names": names, "full_rate": rate, "weight_decay": config.weight_decay if decays else 0.0}
        for (rate, decays), names in groups.items()
    ]
