"""Filters that leave samples and groups out of training. Pure, so that a replay decides as the run did.

Invariant: the decision about a group depends only on the group and the settings, never on other groups or on time.
"""

import enum
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.records import Group
from services.trainer.admission.config import FilterConfig

TRUNCATED: Final = frozenset({"length", "deadline"})
"""Finish reasons of samples whose last turn was cut."""
REPETITION_WINDOW: Final = 10_000
"""Characters at the end of a text that are searched for repetition, as in slime."""
_COMPRESSION_LEVEL: Final = 9


class FilterReason(enum.StrEnum):
    """Why a group was filtered."""

    ZERO_VARIANCE = "zero_variance"
    """Its samples all have the same reward."""
    REPETITION = "repetition"
    """Fewer than two of its samples do not repeat themselves."""
    OVERLONG_PROMPT = "overlong_prompt"
    """Its prompt leaves no room for an answer; it was never played."""
    WRONG_ROW = "wrong_row"
    """Its data row is invalid; it was never played."""
    EASY_POOL = "easy_pool"
    """Its row is in the easy pool and was not drawn; it was never played."""
    HARD_POOL = "hard_pool"
    """Its row is in the hard pool and was not drawn; it was never played."""


class SampleFilter(enum.StrEnum):
    """What a filter did to a sample."""

    TRUNCATED_MASKED = "truncated_masked"
    """It was cut short, and has no gradient."""
    TRUNCATED_ZEROED = "truncated_zeroed"
    """It was cut short, and its reward, which was above 0, became 0."""
    REPETITION_MASKED = "repetition_masked"
    """It repeats itself, and has no gradient."""
    REPETITION_DROPPED = "repetition_dropped"
    """It repeats itself, and is treated as never sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """The filters' decision about a group."""

    reason: FilterReason | None
    """Why the group is left out; None if it is trained."""
    kept: tuple[int, ...]
    """Numbers of the remaining samples, ascending."""
    rewards: tuple[float, ...]
    """Rewards of the remaining samples; NaN for one that was not judged."""
    masked: tuple[bool, ...]
    """Whether each remaining sample is excluded from the gradient."""
    affected: Mapping[str, int]
    """Numbers of samples by the `SampleFilter` that affected them; a sample counts for every one that did."""


def screen(group: Group, config: FilterConfig) -> Screening:
    """Apply the filters to a group that was played."""
    kept, rewards, masked = [], [], []
    affected: Counter[str] = Counter()
    for number, sample in enumerate(group.samples):
        repeats = config.repetition != "keep" and compression_ratio(sample.text) > config.max_compression_ratio
        if repeats and config.repetition == "drop":
            affected[SampleFilter.REPETITION_DROPPED] += 1
            continue
        is_truncated = sample.finish_reason in TRUNCATED
        reward = math.nan if sample.reward is None else sample.reward
        is_masked = is_truncated and config.truncated == "mask"
        # AReaL sets every reward to 0, but a negative reward must not rise.
        is_zeroed = is_truncated and config.truncated == "zero" and reward > 0
        kept.append(number)
        rewards.append(0.0 if is_zeroed else reward)
        masked.append(repeats or is_masked)
        affected[SampleFilter.REPETITION_MASKED] += repeats
        affected[SampleFilter.TRUNCATED_MASKED] += is_masked
        affected[SampleFilter.TRUNCATED_ZEROED] += is_zeroed
    reason = None
    if len(kept) < min(2, len(group.samples)):
        reason = FilterReason.REPETITION
    elif config.zero_variance and not _has_spread(rewards, masked):
        reason = FilterReason.ZERO_VARIANCE
    return Screening(reason=reason, kept=tuple(kept), rewards=tuple(rewards), masked=tuple(masked), affected=affected)


def compression_ratio(text: str) -> float:
    """Return how many times larger the end of a text is than its zlib compression; 0 for an empty text.

    Whisper detects transcripts that loop by this ratio (Radford et al. 2022, "Robust Speech Recognition via Large-Scale
    Weak Supervision", section 4.5); slime reports the share of answers above 10.
    """
    end = text[-REPETITION_WINDOW:].encode(errors="surrogatepass")
    return len(end) / len(zlib.compress(end, _COMPRESSION_LEVEL))


def _has_spread(rewards: list[float], masked: list[bool]) -> bool:
    """Return whether a sample has a gradient: rewards differ, exactly as advantages compare them."""
    judged = [(reward, is_masked) for reward, is_masked in zip(rewards, masked, strict=True) if not math.isnan(reward)]
    return len({reward for reward, _ in judged}) > 1 and not all(is_masked for _, is_masked in judged)
