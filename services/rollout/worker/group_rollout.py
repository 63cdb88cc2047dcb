"""Plays a prompt group: all its samples at once, then one verdict for each.

Invariant: a group holds every sample of its prompt or none. A sample that has tokens never fails its group, however it
ended; one that its environment or its replicas failed is unjudged.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import structlog

from penstock.errors import InvalidRequestError, MissingImageError, PenstockError, PoisonError
from penstock.records import Group, Prompt, Sample, Verdict
from penstock.v1 import reward_pb2
from penstock.verdict_status import UNJUDGED, Status
from services.rollout.worker.episode import Episode, EpisodePlayer
from services.rollout.worker.group_images import GroupImages, Store
from services.rollout.worker.shared_prefill import SharedPrefill
from services.rollout.worker.turn import WAIT_TIMEOUT_S

log = structlog.get_logger()

_STATUS_PREFIX, _METHOD_PREFIX = "VERDICT_STATUS_", "VERDICT_METHOD_"

_VERIFY_TIMEOUT_S = 60.0
"""Deadline of one call that has a group judged: a service judges a group in milliseconds, unless every item takes its
deadline. The call is repeated until the wait timeout is over."""
_FAILED = Verdict(score=0.0, status=Status.FAILED.value, extracted="", method="UNSPECIFIED")


class Verifier(Protocol):
    """What judges responses: `penstock.clients.RewardClient`."""

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Judge `items`; verdicts come in their order."""
        ...


class GroupRollout:
    """Plays whole groups."""

    def __init__(
        self,
        *,
        episodes: EpisodePlayer,
        images: Store,
        verifier: Verifier,
        worker_id: str,
        wait_timeout_s: float = WAIT_TIMEOUT_S,
    ) -> None:
        """Play episodes with `episodes`, keep images in `images`, ask `verifier` for verdicts for `wait_timeout_s`."""
        self._episodes = episodes
        self._images = images
        self._verifier = verifier
        self._worker_id = worker_id
        self._wait_timeout_s = wait_timeout_s

    async def play(self, prompt: Prompt, *, num_deliveries: int = 1) -> Group:
        """Play every sample of `prompt`. If one cannot begin, the others are cancelled.

        If an image of the prompt is no longer stored, the group is lost: no delivery of this prompt can be played.

        Raises:
            InvalidRequestError: the group can never be played or judged.
            PoisonError: it broke every replica that tried it.
            PenstockError: it failed this time; another delivery may succeed.
        """
        started = time.monotonic()
        try:
            images = await GroupImages.load(self._images, prompt)
        except MissingImageError as error:
            return Group(
                id=prompt.id,
                purpose=prompt.purpose,
                num_samples=prompt.num_samples,
                samples=(),
                worker_id=self._worker_id,
                error=str(error),
                is_lost=True,
                num_deliveries=num_deliveries,
            )
        episodes = await self._play_all(prompt, images)
        verdicts = await self._verify(prompt, episodes)
        samples = tuple(episode.to_sample(verdict) for episode, verdict in zip(episodes, verdicts, strict=True))
        log.info(
            "group.played",
            group=prompt.id.message,
            **summarize(samples),
            elapsed_s=round(time.monotonic() - started, 3),
        )
        return Group(
            id=prompt.id,
            purpose=prompt.purpose,
            num_samples=prompt.num_samples,
            samples=samples,
            worker_id=self._worker_id,
            num_deliveries=num_deliveries,
        )

    async def _play_all(self, prompt: Prompt, images: GroupImages) -> list[Episode]:
        prefill = SharedPrefill()
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(self._episodes.play(prompt, number, images, prefill))
                    for number in range(prompt.num_samples)
                ]
        except ExceptionGroup as failures:
            # One error decides what becomes of the group: one that no other delivery can mend, if there is any.
            hopeless = [error for error in failures.exceptions if isinstance(error, InvalidRequestError | PoisonError)]
            raise (hopeless or failures.exceptions)[0] from None
        return [task.result() for task in playing]

    async def _verify(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Verdict | None]:
        items = [
            reward_pb2.VerifyItem(
                item_id=f"{prompt.id.message}/{number}",
                golds=prompt.golds,
                response=episode.text,
                profile=prompt.profile,
            )
            for number, episode in enumerate(episodes)
            if episode.needs_verdict
        ]
        found = iter(await self._call_verifier(items) if items else ())
        return [
            _to_record(next(found), prompt) if episode.needs_verdict else _FAILED if episode.error else None
            for episode in episodes
        ]

    async def _call_verifier(self, items: Sequence[reward_pb2.VerifyItem]) -> list[reward_pb2.Verdict]:
        return await self._verifier.verify_batch(
            items,
            timeout_s=_VERIFY_TIMEOUT_S,
            retry_until=time.monotonic() + self._wait_timeout_s,
        )


def summarize(samples: Sequence[Sample]) -> dict[str, float | int | dict[str, int]]:
    """Numbers of a played group for one line of log."""
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


def _to_record(verdict: reward_pb2.Verdict, prompt: Prompt) -> Verdict:
    """The verdict as it travels to the trainer.

    Raises:
        InvalidRequestError: the gold answer is wrong; no other delivery will judge this group.
        PenstockError: the verdict has no status that is known.
    """
    try:
        name = reward_pb2.VerdictStatus.Name(verdict.status).removeprefix(_STATUS_PREFIX)
    except ValueError:
        name = str(verdict.status)
    try:
        status = Status(name)
    except ValueError:
        raise PenstockError(
            f"verdict {verdict.item_id} has status {name}, which is unknown; update the worker or the reward service"
        ) from None
    if status is Status.GOLD_INVALID:
        raise InvalidRequestError(
            f"gold answers {list(prompt.golds)} of group {prompt.id.group} cannot be read by reward profile "
            f"{prompt.profile!r}; correct the row of the data, or choose another data.profile"
        )
    if status in UNJUDGED:
        log.warning("sample.unjudged", sample=verdict.item_id, status=status, elapsed_s=verdict.elapsed_s)
    return Verdict(
        score=0.0 if status in UNJUDGED else verdict.score,
        status=status.value,
        extracted=verdict.extracted,
        method=reward_pb2.VerdictMethod.Name(verdict.method).removeprefix(_METHOD_PREFIX),
    )
