"""A push of one version to some replicas, until each serves it or has failed.

If a member's transport cannot carry the push, the push to it is repeated over the fallback; after wrong checksums it is
repeated once. A member that failed only because of others takes part again, without them.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import structlog

from penstock.errors import ChecksumError, NotReadyError, PenstockError
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.collective_push import CollectivePush
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.push_calls import Member
from services.trainer.weight_sync.push_outcome import PushOutcome
from services.trainer.weight_sync.push_report import PushReport
from services.trainer.weight_sync.push_stages import PushStages
from services.trainer.weight_sync.replica_pool import ReplicaPool
from services.trainer.weight_sync.rolling_push import RollingPush
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transport_selector import TransportSelector
from services.trainer.weight_sync.transports.base import CollectiveTransport, Transport

log = structlog.get_logger()


class Push:
    """One push. Use once."""

    def __init__(
        self,
        weights: WeightSnapshot,
        pool: ReplicaPool,
        selector: TransportSelector,
        *,
        config: WeightSyncConfig,
        deadlines: PushDeadlines,
        only_lagging: bool = False,
        replaces_newer: bool = False,
        on_half_served: Callable[[], None] = lambda: None,
    ) -> None:
        """Push `weights`, for which `selector` was made ready, to members of `pool`.

        Args:
            weights: Weights of the version.
            pool: Asks members for their state, and records failures.
            selector: Chooses a transport for each part of the members.
            config: How members are paused.
            deadlines: Deadlines of the stages.
            only_lagging: Leave out members that already serve the version.
            replaces_newer: Members may hold a newer version.
            on_half_served: Called when half of the members that can take a push serve the version.
        """
        self._weights = weights
        self._pool = pool
        self._selector = selector
        self._config = config
        self._deadlines = deadlines
        self._only_lagging = only_lagging
        self._replaces_newer = replaces_newer
        self._on_half_served = on_half_served
        self._num_served = 0
        self._is_half_served = False
        self._num_able = 0
        """Members that can take a push, as far as is known."""
        self._done: list[Member] = []
        self._failed: dict[Member, PenstockError] = {}
        self._repeated: set[Member] = set()
        self._failed_delta: set[Member] = set()
        self._stages_s: defaultdict[str, float] = defaultdict(float)
        self._paused_s: defaultdict[Member, float] = defaultdict(float)

    async def run(self, members: Sequence[Member]) -> PushReport:
        """Push to `members`, dropping those that fail."""
        started = time.monotonic()
        version = self._weights.version
        left = tuple(members)
        if self._only_lagging or not self._selector.all_read(left, self._weights):
            left, self._failed = await self._pool.ask(left, lagging_behind=version if self._only_lagging else None)
        self._num_able = len(left)
        while left:
            left = await self._push_to_a_part(left)
        push_s = time.monotonic() - started
        for member in self._done:
            self._pool.failed.remove(member)
        for member, error in self._failed.items():
            await self._pool.add_failure(member, error, version)
        return self._report(push_s)

    async def _push_to_a_part(self, left: tuple[Member, ...]) -> tuple[Member, ...]:
        """Push to those of `left` that share a transport; return the members that still need the push."""
        part, transport = await self._selector.next(
            left,
            self._weights,
            versions=self._pool.versions,
            failed_delta=self._failed_delta,
            only_lagging=self._only_lagging,
        )
        try:
            outcome = await self._over(transport, part)
        except asyncio.CancelledError:
            await self._selector.leave_group()  # an aborted member has left it, whatever the transport
            raise
        await self._selector.put_back(transport, outcome)
        self._done += outcome.done
        for member, seconds in outcome.paused_s.items():
            self._paused_s[member] += seconds
        for stage, seconds in outcome.stages_s.items():
            self._stages_s[stage] += seconds
        ended = set(outcome.done)
        for member in outcome.failed:
            if not self._may_try_again(transport, member, outcome):
                self._failed[member] = outcome.failed[member]
                ended.add(member)
        return tuple(member for member in left if member not in ended)

    async def _over(self, transport: Transport, members: tuple[Member, ...]) -> PushOutcome:
        stages = PushStages(
            self._weights,
            transport,
            config=self._config,
            deadlines=self._deadlines,
            replaces_newer=self._replaces_newer,
        )
        if not isinstance(transport, CollectiveTransport):
            return await RollingPush(stages, members, self._pool.stub, self._note_served, self._note_absent).run()
        return await CollectivePush(stages, members, self._pool.stub, transport, self._note_served).run()

    def _may_try_again(self, transport: Transport, member: Member, outcome: PushOutcome) -> bool:
        """Return whether to repeat the push to a failed member."""
        error = outcome.failed[member]
        has_fallback = self._selector.note_failure(transport, member, error, stage=outcome.failed_in[member])
        self._failed_delta.add(member)
        if has_fallback and isinstance(error, NotReadyError):
            log.info("push.fell_back", replica_id=member.replica_id, transport=transport.name, reason=str(error))
            return True
        if isinstance(error, ChecksumError) and member not in self._repeated:
            log.warning("push.repeated", replica_id=member.replica_id, reason=str(error))
            self._repeated.add(member)
            return True
        return False

    def _note_served(self) -> None:
        self._num_served += 1
        self._tell_at_half()

    def _note_absent(self) -> None:
        self._num_able -= 1
        self._tell_at_half()

    def _tell_at_half(self) -> None:
        if not self._is_half_served and 0 < self._num_able <= 2 * self._num_served:
            self._is_half_served = True
            self._on_half_served()

    def _report(self, push_s: float) -> PushReport:
        report = PushReport(
            version=self._weights.version,
            num_replicas=len(self._done),
            num_failed=len(self._failed),
            num_bytes=self._weights.manifest.num_bytes,
            push_s=push_s,
            paused_s={member.replica_id: seconds for member, seconds in self._paused_s.items()},
            stages_s=dict(self._stages_s),
        )
        if self._done or self._failed or not self._only_lagging:
            log.info(
                "weights.pushed",
                version=report.version,
                num_replicas=report.num_replicas,
                num_failed=report.num_failed,
                num_bytes=report.num_bytes,
                push_s=round(report.push_s, 4),
                pause_s=round(report.pause_s, 4),
                pause_max_s=round(report.longest_pause[1], 4),
            )
        return report
