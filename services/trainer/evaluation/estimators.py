"""Estimates a policy's quality from samples of many prompts: means with errors, pass@k and maj@k. Pure.

All estimates are expectations over the samples that were drawn, so none depends on the samples' order or on a seed.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

ABSTAINED: Final = None
"""The vote of a sample that gave no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    standard_error: float | None
    """Standard error with prompts as clusters; None with fewer than two prompts, which do not determine it."""


def estimate(values: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values, with a standard error that treats each prompt as one cluster.

    Samples of one prompt resemble each other, so counting them as independent would understate the error. The error is
    the cluster-robust one with the correction G / (G - 1). With the same number of values per prompt, it is the
    standard deviation of the prompts' means divided by the root of their number (Miller 2024, arXiv 2411.00640).

    Args:
        values: The values of each prompt, at least one each.

    Raises:
        ValueError: there are no prompts, or a prompt has no values.
    """
    if not values or not all(values):
        raise ValueError("an estimate needs at least one prompt, and a value of each")
    num_values, num_prompts = sum(map(len, values)), len(values)
    mean = math.fsum(math.fsum(each) for each in values) / num_values
    if num_prompts < 2:
        return Estimate(value=mean, standard_error=None)
    residuals = [math.fsum(value - mean for value in each) for each in values]
    variance = math.fsum(residual**2 for residual in residuals) * num_prompts / (num_prompts - 1) / num_values**2
    return Estimate(value=mean, standard_error=math.sqrt(variance))


def pass_at(k: int, *, num_samples: int, num_correct: int) -> float:
    """Return the probability that at least one of `k` of the samples is correct.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: `k` is not in 1 .. num_samples, or num_correct not in 0 .. num_samples.
    """
    _require_k(k, num_samples)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} must be in 0 .. {num_samples}")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at(k: int, votes: Sequence[Hashable], *, correct: Hashable) -> float:
    """Return the probability that the most frequent vote among `k` of the samples is the correct one.

    The mean over all subsets of `k` samples, exactly. Answers that tie share the win equally. Samples
    that abstained are drawn like others but cannot win; if all of them abstained, nothing is correct.

    Args:
        k: Samples that vote.
        votes: Each sample's vote, or `ABSTAINED`.
        correct: The vote that is correct.

    Raises:
        ValueError: `k` is not in 1 .. len(votes).
    """
    _require_k(k, len(votes))
    counts = Counter(vote for vote in votes if vote is not ABSTAINED)
    num_abstained = len(votes) - counts.total()
    num_correct = counts.pop(correct, 0)
    others = tuple(sorted(counts.values()))
    num_choices = math.comb(len(votes), k)
    won = 0.0
    for num_votes in range(1, min(k, num_correct) + 1):
        chosen = math.comb(num_correct, num_votes)
        for num_ties, num_ways in _ways(others, num_abstained, k - num_votes, num_votes):
            won += chosen * num_ways / ((num_ties + 1) * num_choices)  # integers, each of which may exceed a float
    return won


@lru_cache(maxsize=4096)
def _ways(counts: tuple[int, ...], num_abstained: int, num_chosen: int, most: int) -> Sequence[tuple[int, int]]:
    """Count the ways to choose `num_chosen` samples of the other answers so that no answer has more than `most` votes;
    return pairs of (answers with exactly `most`, ways)."""
    ways = {(0, 0): 1}  # (samples chosen, answers with exactly `most`): ways
    for count in counts:
        extended: Counter[tuple[int, int]] = Counter()
        for (size, ties), number in ways.items():
            for taken in range(min(count, most, num_chosen - size) + 1):
                extended[size + taken, ties + (taken == most)] += number * math.comb(count, taken)
        ways = extended
    totals: Counter[int] = Counter()
    for (size, ties), number in ways.items():
        totals[ties] += number * math.comb(num_abstained, num_chosen - size)
    return sorted(totals.items())


def _require_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must be in 1 .. {num_samples}, the number of samples")
