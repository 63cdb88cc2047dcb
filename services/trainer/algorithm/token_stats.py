"""Metrics of the tokens of an optimizer step: the gap between trainer and engine, staleness, and what each axis did.

Legend: N = the policy's own tokens of the optimizer batch. Values are computed in float64 over the whole batch at once,
by the same functions as the loss, so the result does not depend on how the batch was cut.
"""

import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.ratio import MAX_LOG_RATIO
from services.trainer.algorithm.tokens import Samples, Tokens


def token_stats(tokens: Tokens, samples: Samples, config: AlgorithmConfig, *, version: int) -> dict[str, float]:
    """Return the metrics by name.

    With d = logp_trainer - logp_engine of each sampled token:

    - `dlogp_mean`, `dlogp_max`: of |d|. With `_current`, of tokens sampled by the current version, where d is
      numerical error alone; with `_lag_k`, of tokens k versions old, where d includes training.
    - `kl_k1`, `kl_k3`: estimates of KL(engine || trainer): mean of -d, and of exp(d) - 1 - d (Schulman 2020,
      "Approximating KL Divergence").
    - `tis_mean`, `tis_capped_fraction`: importance weight after the cap, share of tokens at the cap.
    - `clip_fraction`: share of tokens that the trust region leaves without gradient.
    - `token_lag_mean`, `token_lag_max`: published version minus the token's version.

    Args:
        tokens: Of the whole batch, detached, with the trainer's logprobs at the start of the step.
        samples: Of the batch.
        config: The axes.
        version: The published version, which the trainer's weights have before the step.
    """
    delta_N = tokens.logprobs_N - tokens.engine_logprobs_N
    clamped_N = delta_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lag_N = version - tokens.versions_N
    gap_N = delta_N.abs()
    loss = policy_loss(tokens, samples, config)
    metrics = {
        "num_tokens": float(len(delta_N)),
        "dlogp_mean": gap_N.mean(),
        "dlogp_max": gap_N.max(),
        "kl_k1": -delta_N.mean(),
        "kl_k3": (clamped_N.exp() - 1 - clamped_N).mean(),
        "token_lag_mean": lag_N.double().mean(),
        "token_lag_max": lag_N.max(),
        "clip_fraction": loss.outside_N.double().mean(),
    }
    if config.correction.kind == "truncate":
        metrics["tis_mean"] = loss.correction_N.mean()
        metrics["tis_capped_fraction"] = (clamped_N.exp() > config.correction.high).double().mean()
    for lag in torch.unique(lag_N).tolist():
        of_lag = gap_N[lag_N == lag]
        metrics[f"dlogp_mean_lag_{lag}"] = of_lag.mean()
        metrics[f"num_tokens_lag_{lag}"] = float(len(of_lag))
        if lag == 0:
            metrics["dlogp_mean_current"] = of_lag.mean()
            metrics["dlogp_max_current"] = of_lag.max()
    return {name: float(value) for name, value in metrics.items()}
