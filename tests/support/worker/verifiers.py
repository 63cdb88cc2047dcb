"""Reward services that follow a rule, for tests of episodes."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.v1 import reward_pb2


@dataclasses.dataclass
class Boxes:
    """Judges a text right if it holds \\boxed{3}; or answers with `status`, or raises `failure`."""

    status: Any = reward_pb2.VERDICT_STATUS_OK
    failure: Exception | None = None
    before: Callable[[], Awaitable[object]] | None = None
    judged: list[str] = dataclasses.field(default_factory=list)

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        if self.before is not None:
            await self.before()
        if self.failure is not None:
            raise self.failure
        self.judged += [item.response for item in items]
        return [
            reward_pb2.Verdict(
                item_id=item.item_id, score=float("\\boxed{3}" in item.response), status=self.status, extracted="3"
            )
            for item in items
        ]
