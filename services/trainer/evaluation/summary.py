"""The numbers of an evaluation, over a set and over each of its sources. Pure."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.trainer.evaluation.estimators import Estimate, estimate, majority_at, pass_at
from services.trainer.evaluation.outcome import CORRECT, PlayedPrompt, PlayedSample
from services.trainer.telemetry.episode_metrics import mean_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of the samples' lengths, in tokens."""

    mean: float
    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Lengths":
        """Describe at least one length."""
        ordered = sorted(lengths)

        def rank(share: float) -> int:
            return ordered[math.ceil(share * len(ordered)) - 1]

        return cls(mean=sum(ordered) / len(ordered), median=rank(0.5), p95=rank(0.95), max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results of a set, or of a part of one."""

    num_prompts: int
    """Prompts that were played."""
    num_failed_prompts: int
    """Prompts that could not be played; no other number includes them."""
    samples_per_prompt: int
    score: Estimate | None
    """avg@n: the mean score of all samples. An unjudged sample counts as 0. None if no prompt was played."""
    pass_at: dict[int, Estimate]
    """pass@k by k: the powers of two up to n, and n."""
    majority_at: dict[int, Estimate]
    """maj@k by k, as in `pass_at` but from 2 on: maj@1 is pass@1."""
    truncated_fraction: float
    """Share of the samples that were cut."""
    no_answer_fraction: float
    """Share of the samples in which the verifier found no answer."""
    unjudged_fraction: float
    """Share of the samples that could not be judged."""
    tokens: Lengths | None
    turns_mean: float = 0.0
    """Mean turns of a sample."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The environment's metrics by name: the mean over the samples that have each."""
    sources: dict[str, "Summary"] = dataclasses.field(default_factory=dict)
    """The summary of each part of the set, if it is broken down."""

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return dataclasses.asdict(self)


def summarize(prompts: Sequence[PlayedPrompt], *, samples_per_prompt: int, pass_score: float) -> Summary:
    """Return the numbers of a set.

    Args:
        prompts: All prompts of the set.
        samples_per_prompt: n.
        pass_score: Smallest score of a correct sample.
    """
    by_source: dict[str, list[PlayedPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.source].append(prompt)
    parts = {} if set(by_source) <= {""} else by_source
    return dataclasses.replace(
        _summarize(prompts, samples_per_prompt, pass_score),
        sources={name: _summarize(parts[name], samples_per_prompt, pass_score) for name in sorted(parts)},
    )


def _summarize(prompts: Sequence[PlayedPrompt], num_samples: int, pass_score: float) -> Summary:
    played = [prompt for prompt in prompts if not prompt.error]
    samples = [sample for prompt in played for sample in prompt.samples]
    ks = [*(2**power for power in range(num_samples.bit_length()) if 2**power < num_samples), num_samples]

    def over_prompts(value: Callable[[list[Hashable]], float]) -> Estimate:
        return estimate([[value([sample.vote(pass_score=pass_score) for sample in each.samples])] for each in played])

    return Summary(
        num_prompts=len(played),
        num_failed_prompts=len(prompts) - len(played),
        samples_per_prompt=num_samples,
        score=estimate([[sample.score or 0.0 for sample in prompt.samples] for prompt in played]) if played else None,
        pass_at={k: over_prompts(partial(_pass_at, k)) for k in ks if played},
        majority_at={k: over_prompts(partial(majority_at, k, correct=CORRECT)) for k in ks if played and k > 1},
        truncated_fraction=_share(samples, lambda sample: sample.is_truncated),
        no_answer_fraction=_share(samples, lambda sample: sample.has_no_answer),
        unjudged_fraction=_share(samples, lambda sample: sample.score is None),
        tokens=Lengths.of([sample.num_tokens for sample in samples]) if samples else None,
        turns_mean=sum(sample.num_turns for sample in samples) / len(samples) if samples else 0.0,
        metrics=mean_metrics([sample.metrics for sample in samples]),
    )


def _pass_at(k: int, votes: Sequence[Hashable]) -> float:
    return pass_at(k, num_samples=len(votes), num_correct=votes.count(CORRECT))


def _share(samples: Sequence[PlayedSample], is_one: Callable[[PlayedSample], bool]) -> float:
    return sum(map(is_one, samples)) / len(samples) if samples else 0.0
