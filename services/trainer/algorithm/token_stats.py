"""Metrics of the tokens of an optimizer step: the gap between trainer and engine, staleness, and what each axis did.

Legend: N = the policy's own tokens of the optimizer batch. Values are computed in float64 over the whole batch at once,
by the same functions as the loss, so the result does not depend on how the batch was cut.
"""

import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import Loss
from services.trainer.algorithm.ratio import MAX_LOG_RATIO
from services.trainer.algorithm.tokens import Tokens


def token_stats(tokens: Tokens, loss: Loss, config: AlgorithmConfig, *, version: int) -> dict[str, float]:
    """Return the metrics by name.

    With d = logp_trainer - logp_engine of each sampled token:

    - `dlogp_mean`, `dlogp_max`: of |d|. With `_current`, of tokens sampled by the current version, where d is
      numerical error alone; with `_lag_k`, of tokens k versions old, where d includes training.
    - `kl_k1`, `kl_k3`: estimates of KL(engine || trainer): mean of -d, and of exp(d) - 1 - d (Schulman 2020,
      "Approximating KL Divergence").
    - `token_lag_mean`, `token_lag_max`: published version minus the token's version.
    - `ratio_mean`, `ratio_min`, `ratio_max`: of the policy to the anchor.
    - `clip_fraction`: share of tokens whose objective the trust region changed; `_low` and `_high` of those with
      negative and with positive advantage.
    - `tis_mean`, `tis_capped_fraction`, `tis_ess`: importance weight after its bounds, share of tokens that a bound
      changed, and effective share of the batch, (sum w)^2 / (N sum w^2). Only with a correction.
    - `rejected_fraction`: share of tokens with an advantage that have no policy gradient; `_low` and `_high` as above.
      `rejected_fraction_<axis>` is the share of all tokens that each axis gives weight 0.
    - `policy_loss`, and `kl_loss`, `drift_loss`, `entropy_loss` where they are on.
    - `num_measured_tokens`: tokens that all these numbers are of.
    - `entropy`, `kl_reference`: means over tokens, of entropy and of k1 to the reference, where they are known.

    Args:
        tokens: All that the step computed, detached, with the trainer's logprobs at the start of the step.
        loss: Of these.
        config: The axes.
        version: The published version, which the trainer's weights have before the step.
    """
    delta_N = tokens.logprobs_N - tokens.engine_logprobs_N
    clamped_N = delta_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lag_N = version - tokens.versions_N
    gap_N = delta_N.abs()
    metrics: dict[str, torch.Tensor | float] = {
        "num_measured_tokens": float(len(delta_N)),
        "dlogp_mean": gap_N.mean(),
        "dlogp_max": gap_N.max(),
        "kl_k1": -delta_N.mean(),
        "kl_k3": (clamped_N.exp() - 1 - clamped_N).mean(),
        "token_lag_mean": lag_N.double().mean(),
        "token_lag_max": lag_N.max(),
        "ratio_mean": loss.ratio_N.mean(),
        "ratio_min": loss.ratio_N.min(),
        "ratio_max": loss.ratio_N.max(),
        "policy_loss": loss.policy,
    }
    metrics |= _of_axes(loss, config)
    metrics |= {f"{name}_loss": value for name, value in loss.penalties.items()}
    if tokens.entropy_N is not None:
        metrics["entropy"] = tokens.entropy_N.mean()
    if tokens.reference_logprobs_N is not None:
        metrics["kl_reference"] = (tokens.logprobs_N - tokens.reference_logprobs_N).mean()
    for lag in lag_N.unique().tolist():
        of_lag = gap_N[lag_N == lag]
        metrics[f"dlogp_mean_lag_{lag}"] = of_lag.mean()
        metrics[f"num_tokens_lag_{lag}"] = float(len(of_lag))
        if lag == 0:
            metrics["dlogp_mean_current"] = of_lag.mean()
            metrics["dlogp_max_current"] = of_lag.max()
    return {name: float(value) for name, value in metrics.items()}


def _of_axes(loss: Loss, config: AlgorithmConfig) -> dict[str, torch.Tensor | float]:
    advantages_N, weights_N = loss.advantages_N, loss.correction.weights_N
    signs = {"": advantages_N != 0, "_low": advantages_N < 0, "_high": advantages_N > 0}
    metrics: dict[str, torch.Tensor | float] = {}
    for suffix, chosen_N in signs.items():
        metrics[f"clip_fraction{suffix}"] = _share(loss.region.bounded_N & (chosen_N if suffix else True))
        metrics[f"rejected_fraction{suffix}"] = _share(~loss.trained_N[chosen_N])
    if config.trust_region.kind != "none":
        metrics["rejected_fraction_trust_region"] = _share(loss.region.outside_N)
    if config.rejection.kind != "none":
        metrics["rejected_fraction_rejection"] = _share(loss.rejected_N)
    if config.correction.veto_low or config.correction.veto_high:
        metrics["rejected_fraction_veto"] = _share(loss.correction.vetoed_N)
    if config.correction.kind != "none":
        metrics["rejected_fraction_correction"] = _share(weights_N == 0)
        metrics["tis_mean"] = weights_N.mean()
        metrics["tis_capped_fraction"] = _share(loss.correction.bounded_N)
        squares = weights_N.square().sum()
        metrics["tis_ess"] = weights_N.sum().square() / (len(weights_N) * squares) if squares > 0 else 0.0
    return metrics


def _share(mask_N: torch.Tensor) -> torch.Tensor | float:
    """The share of tokens for which the mask holds; 0 of none."""
    return mask_N.double().mean() if len(mask_N) else 0.0
