"""What the playing of a sample gives, before its verdict."""

import dataclasses
from typing import Literal, TypeAlias

from penstock.records import Sample, Verdict
from services.rollout.worker.episodes.trajectory import Trajectory

Ending: TypeAlias = Literal["stop", "length", "deadline", "environment", "error"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A sample that was played and has no verdict yet."""

    trajectory: Trajectory
    text: str
    """The policy's own text, turn after turn."""
    answer: str
    """The text of its last turn, for the reward service: an answer that was taken back does not count."""
    finish_reason: Ending
    """See `penstock.records.Sample`."""
    error: str = ""
    """Why the sample cannot be judged: its environment failed, an image was lost, or it broke or failed in the replicas
    that played it."""
    ended_by: str = ""
    """What ended it early; see `penstock.records.Sample`."""
    is_cut_short: bool = False
    """Whether it ended before its environment had answered; see `penstock.records.Sample`."""
    started_at: float = 0.0
    """Seconds since 1970."""
    elapsed_s: float = 0.0

    @property
    def reward(self) -> float | None:
        """The environment's total reward; None if it left that to the reward service, or failed."""
        rewards = [turn.reward for turn in self.trajectory.turns if turn.reward is not None]
        return sum(rewards) if rewards and not self.error else None

    @property
    def needs_verdict(self) -> bool:
        """Whether the reward service decides its reward."""
        return self.reward is None and not self.error

    def to_sample(self, verdict: Verdict | None) -> Sample:
        """Return the finished sample; `verdict` is the reward service's, if it was asked."""
        judged = None if verdict is None or not verdict.is_judged else verdict.score
        return Sample(
            sequences=self.trajectory.to_sequences(),
            reward=judged if self.reward is None else self.reward,
            metrics={name: value for turn in self.trajectory.turns for name, value in turn.metrics.items()},
            finish_reason=self.finish_reason,
            error=self.error,
            ended_by=self.ended_by,
            is_cut_short=self.is_cut_short,
            verdict=verdict,
            turns=self.trajectory.turns,
            started_at=self.started_at,
            elapsed_s=self.elapsed_s,
            text=self.text,
        )
