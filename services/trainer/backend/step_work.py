"""What the ranks compute in a step, how fast, and how evenly it is divided among them."""

from dataclasses import dataclass, field

from services.trainer.backend.policy.model_flops import ModelFlops
from services.trainer.backend.policy.planned_rows import PlannedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a rank's device computes, and how fast it can."""

    flops: ModelFlops
    peak_tflops: float | None
    """Of the device in the precision of the products, in 10^12 operations per second; None if it is not known."""


@dataclass(slots=True, kw_only=True)
class StepWork:
    """The rows of a step so far."""

    flops: float = 0.0
    costs: dict[int, float] = field(default_factory=dict)
    """By group of ranks: see `PlannedRows.group_costs`."""

    def add(self, rows: PlannedRows, arithmetic: Arithmetic, *, num_forward: int = 1, with_gradient: bool) -> None:
        """Add passes over rows.

        Args:
            rows: The rows of all ranks.
            arithmetic: Of the model.
            num_forward: Forward passes.
            with_gradient: Whether a backward pass follows one of them; it costs twice as much as that.
        """
        self.flops += arithmetic.flops.of(rows.product_counts, num_forward=num_forward, with_gradient=with_gradient)
        num_passes = num_forward + 2 * with_gradient
        for group, cost in enumerate(rows.group_costs):
            self.costs[group] = self.costs.get(group, 0.0) + num_passes * cost

    def metrics(self, arithmetic: Arithmetic, *, num_ranks: int, duration_s: float) -> dict[str, float]:
        """Return the metrics of all rows of the step, which took this long."""
        tflops = self.flops / num_ranks / duration_s / 1e12
        total = sum(self.costs.values())
        metrics = {
            "tflops_per_rank": tflops,
            "rank_imbalance": max(self.costs.values()) * len(self.costs) / total if total else 1.0,
        }
        if arithmetic.peak_tflops is not None:
            metrics["mfu"] = tflops / arithmetic.peak_tflops
        return metrics
