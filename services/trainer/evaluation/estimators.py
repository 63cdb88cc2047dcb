"""Estimates a policy's quality from samples of many prompts: means with errors, pass@k and maj@k. Pure.

All estimates are expectations over the samples that were drawn, so none depends on the samples' order or on a seed.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

ABSTAINED: Final = None
"""The vote of a sample that gave no answer."""
_NEGLIGIBLE: Final = 1e-17
"""Votes of the correct answer with which it wins less likely than this are skipped."""


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

    The mean over all subsets of `k` samples, to about 1e-10. Answers that tie share the win equally. Samples that
    abstained are drawn like others but cannot win; if all of them abstained, nothing is correct.

    Draw each sample by itself with the probability p = k / (n + 1). Those draws that have k samples are uniform among
    the subsets of `k`, for any p; this p makes them likely, which keeps rounding small. The answers' votes are
    independent, so their generating functions multiply, here at n + 1 roots of unity. The coefficient of k, divided by
    the probability of k samples, is the mean.

    Args:
        k: Samples that vote.
        votes: Each sample's vote, or `ABSTAINED`.
        correct: The vote that is correct.

    Raises:
        ValueError: `k` is not in 1 .. len(votes).
    """
    num_samples = len(votes)
    _require_k(k, num_samples)
    counts = Counter(vote for vote in votes if vote is not ABSTAINED)
    num_abstained = num_samples - counts.total()
    num_correct = counts.pop(correct, 0)
    if not counts:  # it wins with one vote
        return pass_at(k, num_samples=num_samples, num_correct=num_correct)
    if k == num_samples:
        most = max(counts.values())
        return 0.0 if num_correct < most else 1 / (1 + [*counts.values()].count(num_correct))
    others = sorted(Counter(counts.values()).items())  # (votes, answers that have as many)
    share = k / (num_samples + 1)
    size = num_samples + 1
    places = np.arange(size // 2 + 1)  # at the other roots the values are conjugate
    roots = np.exp(2j * np.pi / size * np.arange(size))
    abstained = (1 - share + share * roots[places]) ** num_abstained
    fewer = {count: np.full(len(places), _binomial(0, count, share), dtype=complex) for count, _ in others}
    won = 0.0
    for most in range(1, min(k, num_correct) + 1):
        # Generating functions of an answer with exactly, and above with fewer than, `most` votes.
        powers = roots[most * places % size]
        as_many = {count: _binomial(most, count, share) * powers for count, _ in others}
        bound = _binomial(most, num_correct, share)
        for count, number in others:
            bound *= abs(fewer[count][0] + as_many[count][0]) ** number
        if bound > _NEGLIGIBLE:
            num_ties = min(sum(number for count, number in others if count >= most), k // most - 1)
            drawn = np.zeros(len(places), dtype=complex)
            for node, weight in _nodes(num_ties):  # the integral of node**ties over 0 .. 1 is 1 / (1 + ties)
                product = weight * abstained
                for count, number in others:
                    product = product * (fewer[count] + node * as_many[count]) ** number
                drawn += product
            won += _binomial(most, num_correct, share) * float(np.fft.irfft(drawn.conj(), size)[k - most])
        for count, _ in others:
            fewer[count] += as_many[count]
    return min(max(won / _binomial(k, num_samples, share), 0.0), 1.0)


def _binomial(taken: int, count: int, share: float) -> float:
    """Return the probability that `taken` of `count` samples are drawn, each with the probability `share`."""
    if taken > count:
        return 0.0
    ways = math.lgamma(count + 1) - math.lgamma(taken + 1) - math.lgamma(count - taken + 1)
    return math.exp(ways + taken * math.log(share) + (count - taken) * math.log1p(-share))


@lru_cache(maxsize=1024)
def _nodes(degree: int) -> list[tuple[float, float]]:
    """Return the nodes and weights of the Gauss rule on 0 .. 1 that is exact for polynomials of this degree."""
    places, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return list(zip(((places + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))


def _require_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must be in 1 .. {num_samples}, the number of samples")
