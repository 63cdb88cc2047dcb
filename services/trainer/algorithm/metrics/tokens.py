"""Metrics of the tokens of an optimizer step: the gap between trainer and engine, staleness, and each axis's effect.

Legend: N = the policy's own tokens of the optimizer batch. Values are computed in float64 over the whole batch at once,
by the same functions as the loss, so the result does not depend on how the batch was cut. If only some of the samples
without gradient are computed, each of their tokens stands for several: means and shares estimate the whole batch.
"""

import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import Loss
from services.trainer.algorithm.ratio import MAX_LOG_RATIO
from services.trainer.algorithm.tokens import Tokens


def token_stats(
    tokens: Tokens, loss: Loss, config: AlgorithmConfig, *, version: int, counts_N: torch.Tensor | None = None
) -> dict[str, float]:
    """Return the metrics by name. Means, shares and counts by lag weigh each token by `counts_N`; extremes do not.

    With d = logp_trainer - logp_engine of each sampled token:

    - `dlogp_mean`, `dlogp_max`: mean and maximum of |d|. With `_current`, over tokens sampled by the current version,
      where d is only numerical error; with `_lag_k`, over tokens k versions old, where d includes training.
    - `kl_k1`, `kl_k3`: estimates of KL(engine || trainer): mean of -d, and of exp(d) - 1 - d (Schulman 2020,
      "Approximating KL Divergence").
    - `kl_k1_lag_k`, `kl_k3_lag_k`: the same estimates over tokens k versions old.
    - `num_tokens_lag_k`: tokens of the batch that are k versions old, estimated if not all were measured.
    - `token_lag_mean`, `token_lag_max`: published version minus the token's version.
    - `ratio_mean`, `ratio_min`, `ratio_max`: ratio of the policy to the anchor. `ratio_ess`: effective share of the
      batch, (sum r)^2 / (N sum r^2). `kl_anchor`: estimate of KL(anchor || policy), mean of -log r.
    - `clip_fraction`: share of tokens whose objective the trust region changed; `_low` and `_high` count those with
      negative and with positive advantage. `dual_clip_fraction`: those that only the dual clip bounds.
    - `tis_mean`, `tis_capped_fraction`, `tis_ess`: importance weight after its bounds, share of tokens that a bound
      changed, and effective share of the batch, (sum w)^2 / (N sum w^2). Only with a correction.
    - `rejected_fraction`: share of tokens with an advantage that have no policy gradient; `_low` and `_high` as above.
      `rejected_fraction_<axis>` is the share of all tokens that each axis gives weight 0; its `_low` and `_high` are
      the parts of it with negative and with positive advantage.
    - `clamped_fraction`: share of tokens with an advantage that have no policy gradient because their log ratio to the
      anchor is beyond ±20.
    - `policy_loss`, and `kl_loss`, `drift_loss`, `entropy_loss` if they are on.
    - `num_measured_tokens`: computed tokens, which all these numbers are based on.
    - `entropy`, `kl_reference`: means over tokens of entropy and of k1 to the reference, if they are known.

    Args:
        tokens: All tokens that the step computed, detached, with the trainer's logprobs at the start of the step.
        loss: Loss of these tokens.
        config: The axes.
        version: The published version, which the trainer's weights have before the step.
        counts_N: Tokens of the batch that each token stands for (`Batch.counts_G`); None: one.
    """
    counts_N = torch.ones_like(tokens.logprobs_N) if counts_N is None else counts_N
    delta_N = tokens.logprobs_N - tokens.engine_logprobs_N
    clamped_N = delta_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lag_N = version - tokens.versions_N
    gap_N, k3_N = delta_N.abs(), clamped_N.exp() - 1 - clamped_N
    metrics: dict[str, torch.Tensor | float] = {
        "num_measured_tokens": float(len(delta_N)),
        "dlogp_mean": weighted_mean(gap_N, counts_N),
        "dlogp_max": gap_N.max(),
        "kl_k1": -weighted_mean(delta_N, counts_N),
        "kl_k3": weighted_mean(k3_N, counts_N),
        "token_lag_mean": weighted_mean(lag_N, counts_N),
        "token_lag_max": lag_N.max(),
        "ratio_mean": weighted_mean(loss.ratio_N, counts_N),
        "ratio_min": loss.ratio_N.min(),
        "ratio_max": loss.ratio_N.max(),
        "ratio_ess": _effective_share(loss.ratio_N, counts_N),
        "kl_anchor": 0.0 - weighted_mean(loss.ratio_N.log(), counts_N),
        "policy_loss": loss.policy,
    }
    metrics |= _of_axes(loss, config, counts_N)
    metrics |= {f"{name}_loss": value for name, value in loss.penalties.items()}
    if tokens.entropy_N is not None:
        metrics["entropy"] = weighted_mean(tokens.entropy_N, counts_N)
    if tokens.reference_logprobs_N is not None:
        metrics["kl_reference"] = weighted_mean(tokens.logprobs_N - tokens.reference_logprobs_N, counts_N)
    for lag in lag_N.unique().tolist():
        is_of_lag_N = lag_N == lag
        of_lag, counts_of_lag = gap_N[is_of_lag_N], counts_N[is_of_lag_N]
        metrics[f"dlogp_mean_lag_{lag}"] = weighted_mean(of_lag, counts_of_lag)
        metrics[f"kl_k1_lag_{lag}"] = -weighted_mean(delta_N[is_of_lag_N], counts_of_lag)
        metrics[f"kl_k3_lag_{lag}"] = weighted_mean(k3_N[is_of_lag_N], counts_of_lag)
        metrics[f"num_tokens_lag_{lag}"] = counts_of_lag.sum()
        if lag == 0:
            metrics["dlogp_mean_current"] = metrics[f"dlogp_mean_lag_{lag}"]
            metrics["dlogp_max_current"] = of_lag.max()
    return {name: float(value) for name, value in metrics.items()}


def weighted_mean(values_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
    """Return the mean of values weighted by their counts."""
    return (values_N * counts_N).sum() / counts_N.sum()


def _of_axes(loss: Loss, config: AlgorithmConfig, counts_N: torch.Tensor) -> dict[str, torch.Tensor | float]:
    advantages_N, weights_N = loss.advantages_N, loss.correction.weights_N
    signs = {"": advantages_N != 0, "_low": advantages_N < 0, "_high": advantages_N > 0}
    metrics: dict[str, torch.Tensor | float] = {}
    for suffix, chosen_N in signs.items():
        metrics[f"clip_fraction{suffix}"] = _share(loss.region.bounded_N & (chosen_N if suffix else True), counts_N)
        metrics[f"rejected_fraction{suffix}"] = _share(~loss.trained_N[chosen_N], counts_N[chosen_N])
    metrics["clamped_fraction"] = _share(loss.clamped_N[signs[""]], counts_N[signs[""]])
    if config.trust_region.dual:
        is_dual_N = loss.region.bounded_N & signs["_low"] & (loss.ratio_N > 1)
        metrics["dual_clip_fraction"] = _share(is_dual_N, counts_N)
    for axis, rejected_N in _rejected_by_axis(loss, config).items():
        for suffix, chosen_N in signs.items():
            share = _share(rejected_N & (chosen_N if suffix else True), counts_N)
            metrics[f"rejected_fraction_{axis}{suffix}"] = share
    if config.correction.kind != "none":
        metrics["tis_mean"] = weighted_mean(weights_N, counts_N)
        metrics["tis_capped_fraction"] = _share(loss.correction.bounded_N, counts_N)
        metrics["tis_ess"] = _effective_share(weights_N, counts_N)
    return metrics


def _rejected_by_axis(loss: Loss, config: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Return bool[N] for each axis that is on: the tokens that it gives weight 0."""
    rejected: dict[str, torch.Tensor] = {}
    if config.trust_region.kind != "none":
        rejected["trust_region"] = loss.region.outside_N
    if config.rejection.kind != "none":
        rejected["rejection"] = loss.rejected_N
    if config.correction.veto_low or config.correction.veto_high:
        rejected["veto"] = loss.correction.vetoed_N
    if config.correction.kind != "none":
        rejected["correction"] = loss.correction.weights_N == 0
    return rejected


def _effective_share(weights_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor | float:
    squares = (counts_N * weights_N.square()).sum()
    return (counts_N * weights_N).sum().square() / (counts_N.sum() * squares) if squares > 0 else 0.0


def _share(mask_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor | float:
    """Return the share of tokens for which the mask holds; 0 if there are no tokens."""
    return weighted_mean(mask_N, counts_N) if len(mask_N) else 0.0
