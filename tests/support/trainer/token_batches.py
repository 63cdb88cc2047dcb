"""Random optimizer batches as the loss sees them, and a toy policy over them, all in float64."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pydantic
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.tokens import Samples, Tokens

VERSION = 7
VOCABULARY = 11
WIDTH = 5
EXAMPLE = "examples.algorithm.own_axes"
"""A person's own axes; the repository is importable in tests."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Samples of several groups: one of equal rewards, one of a single sample, one with an unjudged sample."""

    rewards_G: np.ndarray
    group_G: np.ndarray
    num_tokens_G: np.ndarray
    sample_N: torch.Tensor
    versions_N: torch.Tensor
    features_NH: torch.Tensor
    targets_N: torch.Tensor
    theta_HV: torch.Tensor
    """Weights of the toy policy."""
    engine_N: torch.Tensor
    reference_N: torch.Tensor

    def tokens(self, theta_HV: torch.Tensor, chosen: Sequence[int] | None = None) -> Tokens:
        """The tokens of some samples in that order, with a gradient to `theta_HV`."""
        order = range(len(self.rewards_G)) if chosen is None else chosen
        rows = torch.cat([torch.nonzero(self.sample_N == sample)[:, 0] for sample in order])
        logits_NV = (self.features_NH[rows] @ theta_HV).log_softmax(-1)
        return Tokens(
            logprobs_N=logits_NV.gather(1, self.targets_N[rows, None])[:, 0],
            engine_logprobs_N=self.engine_N[rows],
            versions_N=self.versions_N[rows],
            sample_N=self.sample_N[rows],
            entropy_N=-(logits_NV.exp() * logits_NV).sum(-1),
            reference_logprobs_N=self.reference_N[rows],
        )

    def samples(self, config: AlgorithmConfig, *, masked: Sequence[int] = ()) -> Samples:
        """The samples under an algorithm, some of them masked."""
        whitened = config.kl.kind != "k1_in_reward"
        masked_G = np.isin(np.arange(len(self.rewards_G)), masked)
        advantages_G = sample_advantages(
            self.rewards_G,
            self.group_G,
            self.num_tokens_G,
            config.advantage,
            masked_G=masked_G,
            is_whitened=whitened,
        )
        weights_G = token_weights(self.num_tokens_G, self.group_G, config.aggregation)
        return Samples(
            advantages_G=torch.from_numpy(advantages_G),
            weights_G=torch.from_numpy(np.where(masked_G, 0.0, weights_G)),
            eligible_G=torch.from_numpy(~np.isnan(self.rewards_G) & ~masked_G),
            version=VERSION,
        )


def random_batch(seed: int, *, spread: float = 0.3, num_far: int = 3) -> TokenBatch:
    """A batch.

    Args:
        seed: Of everything.
        spread: Standard deviation of the engine's log-probabilities around the policy's, times a token's age.
        num_far: Tokens whose engine log-probability is off by up to 40.
    """
    rng = np.random.default_rng(seed)
    rewards_G = np.array([1, 0, 0, 1, 0.5, 0.9, 0.9, 0.9, 0.9, 0.7, 1, 0, np.nan, 0.25, 1, 0, 0, 0], dtype=float)
    group_G = np.array([3, 3, 3, 3, 3, 1, 1, 1, 1, 8, 2, 2, 2, 2, 5, 5, 5, 5])
    num_tokens_G = rng.integers(1, 8, len(rewards_G))
    num_tokens_G[[0, 9]] = 1
    sample_N = torch.from_numpy(np.repeat(np.arange(len(rewards_G)), num_tokens_G))
    features_NH = torch.from_numpy(rng.normal(size=(len(sample_N), WIDTH)))
    targets_N = torch.from_numpy(rng.integers(0, VOCABULARY, len(sample_N)))
    theta_HV = torch.from_numpy(rng.normal(size=(WIDTH, VOCABULARY)))
    logprobs_N = (features_NH @ theta_HV).log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    lag_N = torch.from_numpy(rng.integers(0, 4, len(sample_N)))
    noise_N = torch.from_numpy(rng.normal(size=len(sample_N))) * spread * lag_N
    far = rng.choice(len(sample_N), num_far, replace=False)
    noise_N[far] = torch.from_numpy(rng.uniform(-40, 40, num_far))
    return TokenBatch(
        rewards_G=rewards_G,
        group_G=group_G,
        num_tokens_G=num_tokens_G,
        sample_N=sample_N,
        versions_N=VERSION - lag_N,
        features_NH=features_NH,
        targets_N=targets_N,
        theta_HV=theta_HV,
        engine_N=torch.minimum(logprobs_N + noise_N, torch.tensor(-1e-9, dtype=torch.float64)),
        reference_N=logprobs_N + torch.from_numpy(rng.normal(size=len(sample_N))),
    )


def algorithm(preset: str = "tis", **axes: object) -> AlgorithmConfig:
    """A preset with other values of some axes."""
    return AlgorithmConfig.model_validate({"preset": preset, **axes})


ALGORITHMS: dict[str, AlgorithmConfig] = {
    **{preset: algorithm(preset) for preset in AlgorithmConfig.model_fields["preset"].annotation.__args__},
    "dual clip": algorithm("dapo", trust_region={"dual": 3.0}),
    "dppo_kl with cap": algorithm("dppo", trust_region={"kind": "dppo_kl", "cap": 5.0}),
    "cispo, sequence": algorithm("cispo", ratio="sequence", aggregation={"kind": "sequence"}),
    "correction: clip": algorithm(correction={"kind": "clip", "low": 0.5, "high": 3.0, "normalize": True}),
    "correction: sequence": algorithm(
        correction={"kind": "truncate", "level": "sequence", "high": 3.0, "normalize": True}
    ),
    "correction: geometric, veto": algorithm(
        correction={"kind": "mask", "level": "geometric", "low": 0.5, "high": 2.0, "veto_low": 1e-4, "veto_high": 100}
    ),
    "rejection: opsm": algorithm("ppo", rejection={"kind": "opsm", "max_drop": 0.05}),
    "rejection: geometric": algorithm("ppo", rejection={"kind": "geometric", "low": 0.8, "high": 1.2}),
    "rejection: k3": algorithm("ppo", rejection={"kind": "k3", "max_k3": 0.1}),
    "kl: k1 in reward": algorithm("ppo", advantage={"kind": "reinforce_pp"}, kl={"kind": "k1_in_reward", "coef": 0.1}),
    "kl: k2": algorithm(kl={"kind": "k2", "coef": 0.1, "unbiased": True}),
    "kl: k3": algorithm(kl={"kind": "k3", "coef": 0.1, "unbiased": True}),
    "kl: k3_plus": algorithm(kl={"kind": "k3_plus", "coef": 0.1}),
    "entropy": algorithm(entropy={"kind": "bonus", "coef": 0.05}),
    "entropy: target": algorithm(entropy={"kind": "target", "coef": 0.05}),
    "constant": algorithm(advantage={"kind": "dr_grpo"}, aggregation={"kind": "constant", "length": 8}),
    "rloo, norm": algorithm(advantage={"kind": "rloo", "norm": "batch"}),
    "maxrl": algorithm(advantage={"kind": "maxrl"}),
    "length penalty": algorithm(advantage={"kind": "rloo", "length_penalty": {"kind": "linear"}}),
    "length penalty: soft_overlong": algorithm(
        advantage={
            "kind": "dr_grpo",
            "length_penalty": {"kind": "soft_overlong", "max_tokens": 6, "buffer_tokens": 4},
        }
    ),
    "reinforce_pp_baseline": algorithm(advantage={"kind": "reinforce_pp_baseline"}),
    "gmpo, opo": algorithm(
        "ppo",
        advantage={"kind": "custom", "function": f"{EXAMPLE}:opo"},
        trust_region={"kind": "custom", "function": f"{EXAMPLE}:gmpo", "options": {"low": 0.4, "high": 0.4}},
        aggregation={"kind": "sequence"},
    ),
}
"""Every preset, and every kind of every axis at least once; a test says so."""


def choices(section: pydantic.BaseModel, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Each setting that is one of several names: its key, the names and its value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, pydantic.BaseModel):
            yield from choices(value, f"{prefix}{name}.")
        elif get_origin(field.annotation) is Literal:
            yield f"{prefix}{name}", get_args(field.annotation), value


def unseen_choices(configs: Iterable[AlgorithmConfig]) -> set[tuple[str, str]]:
    """The kinds of axes that no configuration has."""
    names = {(key, name) for key, names, _ in choices(AlgorithmConfig()) for name in names}
    return names - {(key, value) for config in configs for key, _, value in choices(config)}
