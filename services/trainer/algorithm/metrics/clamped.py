"""Why a step has no policy gradient where log ratios are clamped, and the remedy. Needs no torch."""

from typing import Final

MIN_CLAMPED_FRACTION: Final = 0.5
"""Share of tokens with an advantage from which on the clamp is named as the cause; below, the rejection of others."""
CLAMPED_REMEDY: Final = (
    "See dlogp_mean_current in metrics.jsonl: if it is large too, the engines compute another policy than the trainer, "
    "so check model.path and rollout.dtype; if not, the policy moves too far from version to version, so lower "
    "trainer.optimizer.learning_rate or trainer.max_staleness"
)


def clamped_cause(clamped_fraction: float) -> str:
    """Return what is wrong with a step in which no token with an advantage has a policy gradient.

    Args:
        clamped_fraction: Share of the tokens with an advantage that the clamp leaves without one.
    """
    return (
        f"no token with an advantage has a gradient, and {clamped_fraction:.0%} of them for a log ratio of policy to "
        "anchor beyond ±20, where it is clamped"
    )
