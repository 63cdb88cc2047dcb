"""The regularisers: penalties on every token, whatever its advantage.

Legend: N = own tokens. ref = reference policy, d = logp - ref, r = ratio of the policy to the engine, sg() = a stopped
gradient. Values are losses, to be minimised. They are not clamped: far from the reference, where it is needed most, a
clamped penalty would have no gradient. Only k3's exponential continues along its tangent before float32 overflows.
"""

from typing import Any

import torch

from services.trainer.algorithm.axes import EntropyConfig, KlConfig
from services.trainer.algorithm.ratio import exp_ratio

MAX_EXPONENT = 40.0
"""Below d = -40, k3 continues along its tangent. The square of its slope there, which enters the gradient's norm, is
near the limit of float32."""


def kl_penalty(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, engine_logprobs_N: torch.Tensor, config: KlConfig
) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) at each token, with gradient, before its coefficient.

    k2: d^2 / 2. k3: exp(-d) + d - 1 (Schulman 2020, "Approximating KL Divergence"), below d = -40 its tangent.
    k3_plus: k3 in value with the gradient of k2, which on-policy is that of the divergence (verl's k3+).
    unbiased: times r with its gradient for k3 (DeepSeek-V3.2, arXiv 2512.02556), which is r d, computed as such because
        its two parts cancel; times sg(r) for the others, whose gradient alone is the divergence's. The log of r is
        clamped to ±20.

    Args:
        logprobs_N: Current policy, with gradient.
        reference_N: Reference policy.
        engine_logprobs_N: Reported by the engine.
        config: Kind, and whether it is unbiased off-policy.
    """
    difference_N = logprobs_N - reference_N
    k2_N = difference_N.square() / 2
    k3_N = _exp(-difference_N) + difference_N - 1
    penalty_N = {"k2": k2_N, "k3": k3_N, "k3_plus": k3_N.detach() + k2_N - k2_N.detach()}[config.kind]
    if config.unbiased:
        if config.kind == "k3":
            penalty_N = k3_N.detach() + k2_N - k2_N.detach()
        penalty_N = penalty_N * exp_ratio(logprobs_N.detach() - engine_logprobs_N)
    return penalty_N


def _exp(exponent_N: torch.Tensor) -> torch.Tensor:
    """Return exp(), continued above MAX_EXPONENT along its tangent there, so that value and slope are continuous."""
    clamped_N = exponent_N.clamp(max=MAX_EXPONENT)
    return clamped_N.exp() * (1 + (exponent_N - clamped_N))


def drift_penalty(logprobs_N: torch.Tensor, engine_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return (logp - engine)^2 at each token, with gradient (prime-rl's `kl_tau` term)."""
    return (logprobs_N - engine_logprobs_N).square()


class EntropyCoefficient:
    """The factor of the entropy bonus, fixed or adapted to a target (He et al. 2025, "Skywork Open Reasoner 1").

    A step's factor depends on the entropies of earlier steps only, so a step needs just one forward pass.
    """

    def __init__(self, config: EntropyConfig) -> None:
        """Start with the recipe's coefficient."""
        self._config = config
        self._coef = config.coef
        self._is_above_target = False

    @property
    def value(self) -> float:
        """The current step's factor: 0 if the last step's entropy was above the target."""
        return 0.0 if self._config.kind == "none" or self._is_above_target else self._coef

    def observe(self, mean_entropy: float) -> None:
        """Record a step's mean entropy per token, in nats."""
        if self._config.kind == "target":
            self._is_above_target = mean_entropy > self._config.target
            change = -self._config.adjustment if self._is_above_target else self._config.adjustment
            self._coef = max(0.0, self._coef + change)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"kind": self._config.kind, "coef": self._coef, "is_above_target": self._is_above_target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; unless both it and the recipe have kind `target`, the coefficient stays the recipe's."""
        if self._config.kind == state.get("kind", "target") == "target":
            self._coef, self._is_above_target = state["coef"], state["is_above_target"]
