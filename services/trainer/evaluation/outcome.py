"""What became of the prompts of an evaluation, as it is kept in samples.jsonl and summarised."""

from collections.abc import Hashable, Mapping
from typing import Any, Final

import msgspec

from penstock.records import Group
from penstock.verdict_status import Status
from services.trainer.evaluation.estimators import ABSTAINED

CORRECT: Final = ("correct",)
"""The vote of every correct sample: the verifier found them all equal to the gold answer, however they are written."""


class PlayedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt."""

    text: str
    """The policy's own text."""
    score: float | None
    """None if it could not be judged."""
    extracted: str
    """The answer that the verifier found in it; empty if there is none."""
    status: str
    """A `penstock.verdict_status.Status`; empty if the environment gave the score."""
    finish_reason: str
    """As in `penstock.records.Sample`."""
    num_tokens: int
    error: str = ""
    """Why it could not be judged."""
    num_turns: int = 1
    metrics: dict[str, float] = {}
    """What its environment measured, by name; the last value of each."""

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut before the policy finished: by the number of tokens, the context or the deadline."""
        return self.finish_reason in ("length", "deadline")

    @property
    def has_no_answer(self) -> bool:
        """Whether the verifier found no answer in it."""
        return self.status == Status.NO_ANSWER

    def vote(self, *, pass_score: float) -> Hashable:
        """What it votes for in maj@k. Wrong answers are the same if they are written the same."""
        if self.score is not None and self.score >= pass_score:
            return CORRECT
        return self.extracted.strip() or ABSTAINED


class PlayedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a set with its answers: one line of samples.jsonl."""

    set_name: str
    row: int
    """Number of the row in the set, from 0."""
    source: str
    """By which the set is broken down; empty if it is not."""
    messages: list[dict[str, Any]]
    """The prompt for people, with `<image>` where an image stands."""
    golds: tuple[str, ...]
    samples: tuple[PlayedSample, ...]
    images: tuple[str, ...] = ()
    """Content hashes of the prompt's images."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest policy version of its tokens; None if nothing was played, or not by an engine."""
    error: str = ""
    """Why it has no samples; empty if it was played."""


def samples_of(group: Group) -> tuple[PlayedSample, ...]:
    """What an evaluation keeps of a group's samples."""
    return tuple(
        PlayedSample(
            text=sample.text,
            score=sample.reward,
            extracted="" if sample.verdict is None else sample.verdict.extracted,
            status="" if sample.verdict is None else sample.verdict.status,
            finish_reason=sample.finish_reason,
            num_tokens=sample.num_own_tokens,
            error=sample.error,
            num_turns=len(sample.turns),
            metrics=sample.metrics,
        )
        for sample in group.samples
    )


def source_of(extra: Mapping[str, Any], column: str) -> str:
    """The part of its set that a row belongs to: the value of `column`, which may lead into a struct by dots."""
    value: Any = extra
    for name in column.split(".") if column else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return "" if not column else "none" if value is None else str(value)
