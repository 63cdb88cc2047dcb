"""Outcomes of the prompts of an evaluation, as stored in samples.jsonl and summarised."""

from collections.abc import Hashable, Mapping
from typing import Any, Final

import msgspec

from penstock.records import Group
from penstock.verdict_status import Status
from services.trainer.evaluation.estimators import ABSTAINED

CORRECT: Final = ("correct",)
"""The vote of every correct sample: the verifier found them all equal to the gold answer, whatever their spelling."""


class PlayedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt."""

    text: str
    """The policy's own text."""
    score: float | None
    """The verifier's or the environment's score; None if it could not be judged."""
    extracted: str
    """The answer that the verifier found in the text; empty if there is none."""
    status: str
    """A `penstock.verdict_status.Status`; empty if the environment gave the score."""
    finish_reason: str
    """As in `penstock.records.Sample`."""
    num_tokens: int
    error: str = ""
    """Why it could not be judged."""
    num_turns: int = 1
    metrics: dict[str, float] = {}
    """Its environment's metrics by name; the last value of each."""

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut before the policy finished, by the token limit, the context or the deadline."""
        return self.finish_reason in ("length", "deadline")

    @property
    def has_no_answer(self) -> bool:
        """Whether the verifier found no answer in it."""
        return self.status == Status.NO_ANSWER

    def vote(self, *, pass_score: float) -> Hashable:
        """Return its vote in maj@k. Wrong answers are equal if their text is equal."""
        if self.score is not None and self.score >= pass_score:
            return CORRECT
        return self.extracted.strip() or ABSTAINED


class PlayedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a set with its answers: one line of samples.jsonl."""

    set_name: str
    row: int
    """Number of the row in the set, from 0."""
    source: str
    """Its part of the set, if the set is broken down; otherwise empty."""
    messages: list[dict[str, Any]]
    """The prompt for people to read, with `<image>` for each image."""
    golds: tuple[str, ...]
    samples: tuple[PlayedSample, ...]
    images: tuple[str, ...] = ()
    """Content hashes of the prompt's images."""
    terms: str = ""
    """Digest of the rest of the row that answers or verdicts may depend on: profile, environment, tools, variables of
    the template, sampling, limits, further columns. Empty in files of earlier versions."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest policy version of its tokens; None if nothing was played, or not by an engine."""
    error: str = ""
    """Why it has no samples; empty if it was played."""


def samples_of(group: Group) -> tuple[PlayedSample, ...]:
    """Return the parts of a group's samples that an evaluation keeps."""
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
    """Return the part of the set that a row belongs to: the value of `column`, which may be a dotted path."""
    value: Any = extra
    for name in column.split(".") if column else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return "" if not column else "none" if value is None else str(value)
