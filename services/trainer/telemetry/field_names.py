"""Names of our metrics in other frameworks' dashboards.

A name is listed only if the other framework computes the same number; docs/metrics.md says where that depends on
settings or rewards, and how the formulas of arithmetic differ.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FIELD_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # verl: actor/, critic/, response_length/, rollout_corr/, timing_s/. prime-rl: optim/, mismatch_kl/, entropy/,
        # is_masked/, time/. slime: train/, rollout/. TRL: clip_ratio/, completions/, sampling/. SkyRL: policy/,
        # reward/, async/, timing/. AReaL: ppo_actor/.
        "loss": ("train/loss",),
        "policy_loss": ("actor/pg_loss", "train/pg_loss", "policy/policy_loss"),
        "grad_norm": (
            "actor/grad_norm",
            "optim/grad_norm",
            "train/grad_norm",
            "policy/raw_grad_norm",
            "ppo_actor/update/grad_norm",
        ),
        "learning_rate": ("actor/lr", "optim/lr", "policy/policy_lr", "ppo_actor/update/lr"),
        "clip_fraction": (
            "actor/pg_clipfrac",
            "clip_ratio/region_mean",
            "train/pg_clipfrac",
            "policy/ppo_clip_ratio",
            "ppo_actor/update/clip_ratio/avg",
        ),
        "clip_fraction_low": ("clip_ratio/low_mean",),
        "clip_fraction_high": ("clip_ratio/high_mean",),
        "dual_clip_fraction": ("actor/pg_clipfrac_lower", "ppo_actor/update/dual_clip_ratio/avg"),
        "entropy": (
            "actor/entropy",
            "entropy/mean",
            "train/entropy_loss",
            "policy/policy_entropy",
            "ppo_actor/update/entropy/avg",
        ),
        "ratio_mean": ("train/ois", "ppo_actor/update/importance_weight/avg"),
        "ratio_min": ("ppo_actor/update/importance_weight/min",),
        "ratio_max": ("ppo_actor/update/importance_weight/max",),
        "kl_anchor": ("actor/ppo_kl",),
        "kl_k1": ("rollout_corr/kl",),
        "kl_k3": ("rollout_corr/k3_kl", "mismatch_kl/mean"),
        "tis_mean": ("rollout_corr/rollout_is_mean", "sampling/importance_sampling_ratio/mean"),
        "tis_capped_fraction": ("train/tis_clipfrac",),
        "tis_ess": ("rollout_corr/rollout_is_eff_sample_size",),
        "rejected_fraction_trust_region": ("is_masked/mean",),  # of prime-rl's trust region, DPPO's
        "rejected_fraction_trust_region_low": ("is_masked_low/mean",),
        "rejected_fraction_trust_region_high": ("is_masked_high/mean",),
        "rejected_fraction_rejection": ("rollout_corr/rollout_rs_masked_fraction",),
        "dlogp_mean": ("train/train_rollout_logprob_abs_diff", "sampling/sampling_logp_difference/mean"),
        "dlogp_max": ("sampling/sampling_logp_difference/max",),
        "reward_mean": (
            "critic/score/mean",
            "critic/rewards/mean",
            "reward/all/mean",
            "reward/avg_raw_reward",
            "rollout/raw_reward",
            "reward",
        ),
        "pass_rate_0": ("solve_none",),  # for rewards of 0 and 1
        "pass_rate_100": ("solve_all",),
        "reward_max": ("critic/score/max", "critic/rewards/max"),
        "reward_min": ("critic/score/min", "critic/rewards/min"),
        "truncated_fraction": ("response_length/clip_ratio", "rollout/truncated_ratio", "completions/clipped_ratio"),
        "zero_std_fraction": ("frac_reward_zero_std",),
        "sample_tokens_mean": ("response_length/mean", "rollout/response_len/mean", "completions/mean_length"),
        "sample_tokens_min": ("response_length/min", "rollout/response_len/min", "completions/min_length"),
        "sample_tokens_max": ("response_length/max", "rollout/response_len/max", "completions/max_length"),
        "staleness_mean": ("async/staleness_mean",),
        "staleness_max": ("async/staleness_max",),
        "lagging_group_fraction": ("async/staleness_ratio",),
        "wait_s": ("time/wait_for_batch", "perf/train_wait_time", "timing/wait_for_generation_buffer"),
        "step_s": ("time/step", "perf/step_time", "timing_s/step", "perf/time_per_step", "timing/step"),
        "train_s": ("perf/train_time",),
        "step_time_s": ("time/forward_backward", "timing_s/update_actor", "timing/policy_train"),
        "trainer_idle_fraction": ("perf/wait_time_ratio",),
        "trained_tokens_per_s": ("perf/actor_train_tok_per_s",),
        "tflops_per_rank": ("perf/actor_train_tflops",),
        "mfu": ("perf/mfu/actor",),
        "push_s": ("time/broadcast_weights", "perf/update_weights_time", "timing_s/update_weights"),
        "checkpoint_write_s": ("time/save_ckpt",),
    }
)
"""Other frameworks' names by our name."""


def field_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step's values under the other frameworks' names; metrics that the step lacks are left out."""
    return {theirs: row[ours] for ours, names in FIELD_NAMES.items() if ours in row for theirs in names}
