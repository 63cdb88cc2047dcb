"""Plays a prompt group: all its samples at once, one verdict for each, and one group in the end or none at all."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import structlog

from penstock.errors import InvalidRequestError, PenstockError
from penstock.records import UNJUDGED, Group, Prompt, Sample, Verdict
from penstock.v1 import reward_pb2
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.episode import Episode, EpisodePlayer

log = structlog.get_logger()

_STATUS_PREFIX, _METHOD_PREFIX = "VERDICT_STATUS_", "VERDICT_METHOD_"

SCORED = frozenset({"OK", "NO_ANSWER", "UNPARSEABLE", "TOO_LARGE"})
"""Statuses of a response that was judged."""


class Verifier(Protocol):
    """What judges responses: `penstock.clients.RewardClient`."""

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Verifier `items`; verdicts come in their order."""
        ...


class GroupRollout:
    """Plays whole groups."""

    def __init__(self, config: WorkerConfig, *, episodes: EpisodePlayer, verifier: Verifier, worker_id: str) -> None:
        """Play episodes with `episodes` and have them judged by `verifier`."""
        self._config = config
        self._episodes = episodes
        self._verifier = verifier
        self._worker_id = worker_id

    async def play(self, prompt: Prompt) -> Group:
        """Play every sample of `prompt`. When one fails for good the others are cancelled.

        Raises:
            InvalidRequestError: the group can never be played or judged.
            PenstockError: it failed this time; another try may succeed.
        """
        started = time.monotonic()
        deadline = started + self._config.episode_timeout_s
        episodes = await self._play_all(prompt, deadline)
        verdicts = await self._verify(prompt, episodes, deadline)
        samples = tuple(episode.to_sample(verdict) for episode, verdict in zip(episodes, verdicts, strict=True))
        log.info(
            "group.played",
            group=prompt.message_id,
            **summarize(samples),
            elapsed_s=round(time.monotonic() - started, 3),
        )
        return Group(prompt=prompt, samples=samples, worker_id=self._worker_id)

    async def _play_all(self, prompt: Prompt, deadline: float) -> list[Episode]:
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(self._episodes.play(prompt, number, deadline=deadline))
                    for number in range(prompt.num_samples)
                ]
        except ExceptionGroup as failures:
            # What becomes of the group depends on one error: the one that no other try can mend, if there is one.
            hopeless = [error for error in failures.exceptions if isinstance(error, InvalidRequestError)]
            raise (hopeless or failures.exceptions)[0] from None
        return [task.result() for task in playing]

    async def _verify(self, prompt: Prompt, episodes: Sequence[Episode], deadline: float) -> list[Verdict]:
        items = [
            reward_pb2.VerifyItem(
                item_id=f"{prompt.message_id}/{number}",
                golds=prompt.golds,
                response=episode.text,
                profile=prompt.profile,
            )
            for number, episode in enumerate(episodes)
        ]
        timeout_s = self._config.verify_timeout_s
        verdicts = await self._verifier.verify_batch(items, timeout_s=timeout_s, retry_until=deadline)
        return [_to_record(verdict, prompt) for verdict in verdicts]


def summarize(samples: Sequence[Sample]) -> dict[str, float | int | dict[str, int]]:
    """Numbers of a played group for one line of log."""
    statuses = Counter(sample.verdict.status for sample in samples)
    return {
        "num_samples": len(samples),
        "mean_score": round(sum(sample.verdict.score for sample in samples) / len(samples), 4),
        "num_own_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "oldest_version": min(sample.oldest_version for sample in samples),
        "num_unjudged": sum(statuses[status] for status in UNJUDGED),
        "statuses": dict(sorted(statuses.items())),
    }


def _to_record(verdict: reward_pb2.Verdict, prompt: Prompt) -> Verdict:
    """The verdict as it travels to the trainer.

    Raises:
        InvalidRequestError: the gold answer is wrong; no try will ever verifier this group.
        PenstockError: the verdict has no status that is known.
    """
    try:
        status = reward_pb2.VerdictStatus.Name(verdict.status).removeprefix(_STATUS_PREFIX)
    except ValueError:
        status = str(verdict.status)
    if status == "GOLD_INVALID":
        raise InvalidRequestError(
            f"gold answers {list(prompt.golds)} of group {prompt.group_id} cannot be read by reward profile "
            f"{prompt.profile!r}; correct the row of the data, or choose another data.profile"
        )
    if status not in SCORED | UNJUDGED:
        raise PenstockError(
            f"verdict {verdict.item_id} has status {status}, which is unknown; update worker or service"
        )
    if status in UNJUDGED:
        log.warning("sample.unjudged", sample=verdict.item_id, status=status, elapsed_s=verdict.elapsed_s)
    return Verdict(
        score=verdict.score if status in SCORED else 0.0,
        status=status,
        extracted=verdict.extracted,
        method=reward_pb2.VerdictMethod.Name(verdict.method).removeprefix(_METHOD_PREFIX),
    )
