"""Asks the reward service for verdicts, for finished samples and for environments that check answers.

Invariant: an unjudged answer has a status that says so and no score; it is never a silent zero.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from penstock.errors import InvalidRequestError, PenstockError
from penstock.records import Prompt, Verdict, text_for_verifiers
from penstock.runtime.text import printable
from penstock.telemetry import spans
from penstock.v1 import reward_pb2
from penstock.verdict_status import UNJUDGED, Status
from services.rollout.worker import metrics
from services.rollout.worker.episodes.turn import WAIT_TIMEOUT_S

log = structlog.get_logger()

_STATUS_PREFIX, _METHOD_PREFIX = "VERDICT_STATUS_", "VERDICT_METHOD_"

_VERIFY_TIMEOUT_S = 60.0
"""Deadline in seconds of the first call for a group: a service judges a group in milliseconds, unless every item uses
up its deadline. The call is repeated, with twice the deadline, until the wait timeout is over."""


class Verifier(Protocol):
    """Judges responses: `penstock.clients.RewardClient`."""

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Judge `items`; return their verdicts in order."""
        ...


class AnswerVerifier:
    """Gets verdicts on answers to prompts."""

    def __init__(self, verifier: Verifier, *, wait_timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Ask `verifier`; while it does not answer, ask again for `wait_timeout_s`."""
        self._verifier = verifier
        self._wait_timeout_s = wait_timeout_s

    async def verify(
        self, prompt: Prompt, answers: Sequence[tuple[str, str]], *, needs_golds: bool = True
    ) -> list[Verdict]:
        """Return verdicts on `answers` (item id, text) to `prompt`, in order.

        Args:
            prompt: The prompt, with its gold answers.
            answers: What is judged.
            needs_golds: Whether gold answers that cannot be read are a fault of the prompt. Otherwise they leave an
                answer unjudged.

        Raises:
            InvalidRequestError: the prompt's gold answers are wrong and needed, or there is no such profile.
            PenstockError: no service answers, or an answer breaks the contract.
        """
        asked = text_for_verifiers(prompt.messages)
        items = [
            reward_pb2.VerifyItem(
                item_id=item_id, golds=prompt.golds, response=printable(text), profile=prompt.profile, prompt=asked
            )
            for item_id, text in answers
        ]
        if not items:
            return []
        with (
            metrics.VERDICT_SECONDS.time(),
            spans.recorded("verify", group=prompt.id.message, num_answers=len(items)),
        ):
            verdicts = await self._verifier.verify_batch(
                items, timeout_s=_VERIFY_TIMEOUT_S, retry_until=time.monotonic() + self._wait_timeout_s
            )
        return [_to_record(verdict, prompt, needs_golds=needs_golds) for verdict in verdicts]


def _to_record(verdict: reward_pb2.Verdict, prompt: Prompt, *, needs_golds: bool) -> Verdict:
    """Return the verdict as a record for the trainer.

    Raises:
        InvalidRequestError: the gold answer is wrong; no other delivery will judge this group.
        PenstockError: the verdict has no known status.
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
    if status is Status.GOLD_INVALID and needs_golds:
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
