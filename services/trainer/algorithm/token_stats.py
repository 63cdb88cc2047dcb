"""Metrics of the tokens of an optimizer step: the gap between trainer and engine, and staleness.

Legend: N = the policy's own tokens of a micro-batch. Values are in float64 and cover all micro-batches, so the result
does not depend on how the batch was cut.
"""

from collections import defaultdict

import numpy as np

from services.trainer.config import LossConfig


class TokenStats:
    """Collects the tokens of one optimizer step."""

    def __init__(self, config: LossConfig, version: int) -> None:
        """Start empty; `version` is the published version, which the trainer's weights have before the step."""
        self._config = config
        self._version = version
        self._deltas: list[np.ndarray] = []
        self._advantages: list[np.ndarray] = []
        self._lags: list[np.ndarray] = []

    def add(
        self, logprobs_N: np.ndarray, engine_logprobs_N: np.ndarray, advantages_N: np.ndarray, versions_N: np.ndarray
    ) -> None:
        """Add the tokens of a micro-batch: the trainer's logprobs at the start of the step, and the engine's."""
        self._deltas.append(logprobs_N.astype(np.float64) - engine_logprobs_N)
        self._advantages.append(np.asarray(advantages_N, dtype=np.float64))
        self._lags.append(self._version - versions_N)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name.

        With d = logp_trainer - logp_engine of each sampled token:

        - `dlogp_mean`, `dlogp_max`: of |d|. With `_current`, of tokens sampled by the current version, where d is
          numerical error alone; with `_lag_k`, of tokens k versions old, where d includes training.
        - `kl_k1`, `kl_k3`: estimates of KL(engine || trainer): mean of -d, and of exp(d) - 1 - d (Schulman 2020,
          "Approximating KL Divergence").
        - `tis_mean`, `tis_capped_fraction`: importance weight after the cap, share of tokens at the cap.
        - `clip_fraction`: share of tokens that the clip leaves without gradient. 0 for `tis`, see `loss`.
        - `token_lag_mean`, `token_lag_max`: published version minus the token's version.
        """
        delta = np.concatenate(self._deltas)
        advantages = np.concatenate(self._advantages)
        lags = np.concatenate(self._lags)
        ratio = np.exp(np.clip(delta, -20, 20))
        magnitude = np.abs(delta)
        metrics = {
            "num_tokens": float(len(delta)),
            "dlogp_mean": magnitude.mean(),
            "dlogp_max": magnitude.max(),
            "kl_k1": -delta.mean(),
            "kl_k3": (ratio - 1 - np.clip(delta, -20, 20)).mean(),
            "token_lag_mean": lags.mean(),
            "token_lag_max": float(lags.max()),
        }
        if self._config.importance == "tis":
            metrics["tis_mean"] = np.minimum(ratio, self._config.tis_cap).mean()
            metrics["tis_capped_fraction"] = (ratio > self._config.tis_cap).mean()
            metrics["clip_fraction"] = 0.0
        else:
            is_clipped = (advantages > 0) & (ratio > 1 + self._config.clip_high)
            is_clipped |= (advantages < 0) & (ratio < 1 - self._config.clip_low)
            metrics["clip_fraction"] = is_clipped.mean()
        by_lag: dict[int, np.ndarray] = defaultdict(lambda: np.empty(0))
        for lag in np.unique(lags):
            by_lag[int(lag)] = magnitude[lags == lag]
        for lag, values in by_lag.items():
            metrics[f"dlogp_mean_lag_{lag}"] = values.mean()
            metrics[f"num_tokens_lag_{lag}"] = float(len(values))
        if 0 in by_lag:
            metrics["dlogp_mean_current"] = by_lag[0].mean()
            metrics["dlogp_max_current"] = by_lag[0].max()
        return {name: float(value) for name, value in metrics.items()}
