"""The anchor: the log-probabilities that the ratio of the trust region is taken against.

Legend: N = own tokens. mu = the engine's log-probability, V = the published version, v = the version of a token.

With one optimizer step per version, the proximal policy, which PPO calls old, is the policy itself. Its logprobs are
those of the forward pass, detached, and cost nothing. The ratio is then 1 in value: it has a gradient, but a clip has
no effect. The correction bounds stale tokens.

`log_linear` puts the anchor one version back instead, so that the clip acts: on a token that is V - v versions old, the
ratio is its movement per version, exp((logp - mu) / (V - v)), and the correction takes the rest. For tokens of the
current version, and for those one version old, the anchor is the engine.
"""

from typing import Literal

import torch


def anchor_logprobs(
    logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    versions_N: torch.Tensor,
    *,
    version: int,
    kind: Literal["rollout", "proximal", "log_linear"],
) -> torch.Tensor:
    """Return [N]: the anchor's log-probabilities, without gradient.

    rollout: mu. proximal: logp. log_linear: mu + (V - 1 - v) / (V - v) * (logp - mu), and mu where v >= V (AReaL,
    `compute_prox_logp_approximations`, with the version of each token from the engine that sampled it).

    Args:
        logprobs_N: Current policy.
        engine_logprobs_N: Reported by the engine.
        versions_N: Version that sampled each token.
        version: The published version: the one of the weights before the step.
        kind: rollout, proximal or log_linear.
    """
    if kind == "rollout":
        return engine_logprobs_N
    if kind == "proximal":
        return logprobs_N.detach()
    lag_N = (version - versions_N).clamp(min=1).to(engine_logprobs_N.dtype)
    return engine_logprobs_N + (lag_N - 1) / lag_N * (logprobs_N.detach() - engine_logprobs_N)
