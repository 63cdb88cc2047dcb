"""A push to members that fetch the weights on their own: each goes through all stages alone, at its own pace.

Invariants: no member waits for another, so one that fails or hangs costs the others nothing; a member generates until
its turn comes and again as soon as it has committed, while others still hold the previous version.

Few members begin at a time. If all began at once, every stopped engine would wait in each stage until the trainer has
made that stage's call to all others: with 512 replicas, seconds instead of milliseconds. While members are busy with
their own part (a load, a drain), more begin.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.errors import NotReadyError, PenstockError
from services.trainer.weight_sync.push_calls import CANCEL_NOTICE_S, CANCELLED, Member, PushCalls, Stub
from services.trainer.weight_sync.push_outcome import PushOutcome
from services.trainer.weight_sync.push_stages import PushStages

_AT_ONCE = 16
"""Members that begin together. Fewer would leave the trainer idle while calls travel."""
_PATIENCE_S = 1.0
"""If no member ends for this many seconds, they are busy with their own part, and the number of members in the push is
doubled: all of 512 begin within 5 s."""


class RollingPush:
    """One push over a pull transport. Use once."""

    def __init__(
        self,
        stages: PushStages,
        members: tuple[Member, ...],
        stub: Callable[[Member], Stub],
        on_served: Callable[[], None],
        on_absent: Callable[[], None],
    ) -> None:
        """Push to `members` in order.

        Args:
            stages: The calls of the push.
            members: The members.
            stub: Returns the connection to a member.
            on_served: Called for each that serves the version.
            on_absent: Called for each that cannot take a push over any transport, as far as is known.
        """
        self._stages = stages
        self._members = members
        self._stub = stub
        self._on_served = on_served
        self._on_absent = on_absent
        self._done: list[Member] = []
        self._failed: dict[Member, PenstockError] = {}

    async def run(self) -> PushOutcome:
        """Take every member through all stages, or until it fails."""
        waiting, running, num_at_once = deque(self._members), set[asyncio.Task[None]](), _AT_ONCE
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    running.add(asyncio.create_task(self._push_to(waiting.popleft())))
                ended, running = await asyncio.wait(running, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                if not ended:
                    num_at_once *= 2
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return PushOutcome(
            done=tuple(self._done),
            failed=self._failed,
            failed_in={member: self._stages.reached[member] for member in self._failed},
            is_reusable=True,
            paused_s=self._stages.paused_s,
            stages_s=self._stages.mean_s,
        )

    async def _push_to(self, member: Member) -> None:
        stages = self._stages
        try:
            await stages.take_alone(self._stub(member), member)
            self._done.append(member)
            self._on_served()
        except PenstockError as error:
            self._failed[member] = error
            if member not in stages.absent:
                await self._abort(member, str(error), stages.deadlines.control_s)
            elif not isinstance(error, NotReadyError):  # which another transport may get around
                self._on_absent()
        except asyncio.CancelledError:
            await self._abort(member, CANCELLED, CANCEL_NOTICE_S)
            raise

    async def _abort(self, member: Member, reason: str, timeout_s: float) -> None:
        await PushCalls((member,), self._stub, self._stages.push_id).abort((member,), reason, timeout_s)
