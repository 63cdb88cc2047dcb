"""Plays a prompt group: all its samples at once, then one verdict for each.

Invariant: a group holds every sample of its prompt or none. A sample with tokens never fails its group, however it
ended; if its environment or its replicas failed, it is unjudged.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence

from penstock.errors import InvalidRequestError, MissingImageError, PoisonError
from penstock.names import SINGLE_TURN
from penstock.records import Group, Prompt, Sample, Verdict
from penstock.telemetry import spans
from penstock.verdict_status import Status
from services.rollout.worker import metrics
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.group_images import GroupImages, Store
from services.rollout.worker.players import Played, Player
from services.rollout.worker.shared_rendering import SharedRendering

_CUT_SHORT = ("length", "deadline", "environment")
_FAILED = Verdict(score=0.0, status=Status.FAILED.value, extracted="", method="UNSPECIFIED")


class GroupRollout:
    """Plays whole groups."""

    def __init__(
        self,
        *,
        episodes: Player,
        images: Store,
        answer_verifier: AnswerVerifier,
        worker_id: str,
    ) -> None:
        """Play episodes with `episodes`, keep images in `images`, have `answer_verifier` verify the samples."""
        self._episodes = episodes
        self._images = images
        self._answer_verifier = answer_verifier
        self._worker_id = worker_id

    async def play(self, prompt: Prompt, closings: Closings, *, num_deliveries: int = 1) -> Group:
        """Play every sample of `prompt`, and close what they hold by `closings`. If one cannot begin, the others are
        cancelled.

        If an image of the prompt is no longer stored, the group is lost: no delivery of this prompt can be played.

        Raises:
            InvalidRequestError: the group can never be played or judged.
            PoisonError: it broke every replica that tried it.
            PenstockError: it failed this time; another delivery may succeed.
        """
        with spans.recorded("group.played", group=prompt.id.message, delivery=num_deliveries) as about:
            group = await self._play(prompt, closings, num_deliveries)
            about.update(summarize(group.samples) if group.samples else {"error": group.error})
        return group

    async def _play(self, prompt: Prompt, closings: Closings, num_deliveries: int) -> Group:
        started = time.monotonic()
        try:
            images = await GroupImages.load(self._images, prompt)
        except MissingImageError as error:
            return Group(
                id=prompt.id,
                purpose=prompt.purpose,
                environment=prompt.environment,
                num_samples=prompt.num_samples,
                samples=(),
                worker_id=self._worker_id,
                error=str(error),
                is_lost=True,
                num_deliveries=num_deliveries,
            )
        episodes = await self._play_all(prompt, images, closings)
        verdicts = await self._verify(prompt, episodes)
        samples = tuple(episode.to_sample(verdict) for episode, verdict in zip(episodes, verdicts, strict=True))
        metrics.count_group(samples, time.monotonic() - started)
        return Group(
            id=prompt.id,
            purpose=prompt.purpose,
            environment=prompt.environment,
            num_samples=prompt.num_samples,
            samples=samples,
            worker_id=self._worker_id,
            num_deliveries=num_deliveries,
            temperature=prompt.sampling.temperature,
        )

    async def _play_all(self, prompt: Prompt, images: GroupImages, closings: Closings) -> list[Played]:
        shared = SharedRendering()
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(self._episodes.play(prompt, number, images, shared, closings))
                    for number in range(prompt.num_samples)
                ]
        except BaseExceptionGroup as failures:
            # One error decides about the group: a permanent one, if there is any.
            hopeless = [error for error in failures.exceptions if isinstance(error, InvalidRequestError | PoisonError)]
            raise (hopeless or failures.exceptions)[0] from None
        if stray := [number for number, task in enumerate(playing) if task.cancelled()]:
            raise RuntimeError(f"sample {stray[0]} ended in a cancellation that nobody asked for")
        return [task.result() for task in playing]

    async def _verify(self, prompt: Prompt, episodes: Sequence[Played]) -> list[Verdict | None]:
        answers = [
            (f"{prompt.id.message}/{number}", episode.answer)
            for number, episode in enumerate(episodes)
            if episode.needs_verdict
        ]
        # What an environment rewards by itself needs no gold answer, also where a sample was cut short before that.
        needs_golds = prompt.environment == SINGLE_TURN or any(
            episode.needs_verdict and episode.finish_reason not in _CUT_SHORT for episode in episodes
        )
        found = iter(await self._answer_verifier.verify(prompt, answers, needs_golds=needs_golds))
        return [next(found) if episode.needs_verdict else _FAILED if episode.error else None for episode in episodes]


def summarize(samples: Sequence[Sample]) -> dict[str, float | int | dict[str, int]]:
    """Return statistics of a played group for its span."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    statuses = Counter(sample.verdict.status for sample in samples if sample.verdict is not None)
    return {
        "num_samples": len(samples),
        "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else math.nan,
        "num_own_tokens": sum(sample.num_own_tokens for sample in samples),
        "oldest_version": min(sample.oldest_version for sample in samples),
        "num_unjudged": sum(sample.reward is None for sample in samples),
        "endings": dict(sorted(Counter(sample.finish_reason for sample in samples).items())),
        "statuses": dict(sorted(statuses.items())),
    }
