"""The work of a simulated run: the duration of each sample and each optimizer step, drawn from long-tailed laws.

Invariant: draws depend only on the seed and the group's index, so every loop, real or simulated, has the same work
whatever it does first.
"""

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are log-normal, cut at `max_tokens`; every time is proportional to tokens."""

    seed: int
    samples_per_group: int
    median_tokens: float
    """Median tokens of a sample, before the cut."""
    sigma: float
    """Standard deviation of the logarithm of a sample's length."""
    max_tokens: int
    token_s: float
    """Seconds of an engine per token."""
    train_token_s: float
    """Seconds of an optimizer step per token."""
    train_fixed_s: float
    """Seconds of an optimizer step beside those for its tokens."""

    def num_tokens(self, index: int) -> tuple[int, ...]:
        """Return the tokens of each sample of a group."""
        return _lengths(self.seed, index, self.samples_per_group, self.median_tokens, self.sigma, self.max_tokens)

    def sample_s(self, index: int) -> list[float]:
        """Return the seconds of each sample of a group in a slot."""
        return [num_tokens * self.token_s for num_tokens in self.num_tokens(index)]

    def train_s(self, index: int) -> float:
        """Return the seconds of the optimizer step for a group."""
        return sum(self.num_tokens(index)) * self.train_token_s

    def write(self, path: Path) -> None:
        """Write it for another process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Workload":
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))


@functools.lru_cache(maxsize=100_000)
def _lengths(seed: int, index: int, num: int, median: float, sigma: float, longest: int) -> tuple[int, ...]:
    drawn = median * np.exp(sigma * np.random.default_rng((seed, index)).standard_normal(num))
    return tuple(int(length) for length in np.clip(drawn, 1, longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pool of engines and its work."""

    replicas: int
    slots_per_replica: int
    groups_per_step: int
    workload: Workload

    @property
    def num_slots(self) -> int:
        """Samples that all engines generate at once."""
        return self.replicas * self.slots_per_replica

    def rollout_s(self, indices: range) -> float:
        """Return the seconds that all slots together take for these groups, if none ever idles."""
        return sum(sum(self.workload.sample_s(index)) for index in indices) / self.num_slots

    def train_s(self, indices: range) -> float:
        """Return the seconds of optimizer steps over these groups."""
        fixed_s = self.workload.train_fixed_s * len(indices) / self.groups_per_step
        return fixed_s + sum(self.workload.train_s(index) for index in indices)


_MEDIAN_TOKENS = 150.0
_SIGMA = 1.0
_MAX_TOKENS = 1000
_SAMPLES_PER_GROUP = 8
_FIXED_SHARE = 0.1
"""The part of an optimizer step's mean duration that does not depend on the batch."""


def scenario(replicas: int, *, slots: int, sample_s: float, train_share: float, seed: int = 0) -> Scenario:
    """Return a pool whose slots take one batch at once.

    Args:
        replicas: Number of engines.
        slots: Samples that one engine generates at once.
        sample_s: Mean seconds of a sample.
        train_share: Mean duration of an optimizer step, as a share of the mean time in which all slots together finish
            a batch's number of samples.
        seed: Seed of the draws.
    """
    law = (_SAMPLES_PER_GROUP, _MEDIAN_TOKENS, _SIGMA, _MAX_TOKENS)
    mean_tokens = float(np.mean([_lengths(seed, index, *law) for index in range(4096)]))
    groups_per_step = max(1, replicas * slots // _SAMPLES_PER_GROUP)
    samples_per_step = groups_per_step * _SAMPLES_PER_GROUP
    step_s = train_share * sample_s * samples_per_step / (replicas * slots)
    return Scenario(
        replicas=replicas,
        slots_per_replica=slots,
        groups_per_step=groups_per_step,
        workload=Workload(
            seed=seed,
            samples_per_group=_SAMPLES_PER_GROUP,
            median_tokens=_MEDIAN_TOKENS,
            sigma=_SIGMA,
            max_tokens=_MAX_TOKENS,
            token_s=sample_s / mean_tokens,
            train_token_s=(1 - _FIXED_SHARE) * step_s / (mean_tokens * samples_per_step),
            train_fixed_s=_FIXED_SHARE * step_s,
        ),
    )
