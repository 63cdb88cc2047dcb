"""The slots of all replicas, given out first come, first served.

A call holds a slot from the moment its replica is chosen until its attempt ends. On a PD pair it gets both slots at
once or none, so that no call holds one while it waits for the other. Without a free slot, calls wait in queues bounded
in calls and in bytes. Invariant: a freed slot goes to one call that can use it, and wakes no other: the call that has
waited longest for this replica, or else the longest of all.
"""

import asyncio
import bisect
import heapq
import itertools
import math
import secrets
import time
from collections.abc import Callable

from penstock.errors import InvalidRequestError, OverloadedError, PenstockError, PromptTooLongError, UnavailableError
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from penstock.v1 import common_pb2, generate_pb2
from services.router.balancing import (
    PD_ROLES,
    TRANSIENT,
    Balancer,
    Need,
    NoReplica,
    Query,
    UnroutableReason,
    make_balancer,
)
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.slots.present_replicas import PresentReplicas
from services.router.slots.replica_slots import REJECT_PAUSE_S, ReplicaSlots
from services.router.slots.slot import Slot
from services.router.slots.wait_queue import Ticket, Waiter, WaitQueue
from services.router.tuning import Tuning

_WAIT_SECONDS = metrics.histogram("penstock_router_wait_seconds", "Seconds that calls which got a slot waited for it.")
_RECHECK_S = 5.0
"""Seconds between checks of a waiting call whether waiting still makes sense."""
_RECHECK_SOON_S = 1.0
"""The same for a call that has used up most of `wait_for_replica_s`."""


class SlotPool:
    """The slots of a pool. It owns all counters; balancing gets immutable views of them."""

    def __init__(
        self,
        config: RouterConfig,
        pool: Pool,
        *,
        tuning: Tuning,
        security: Security,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Give out the slots of `pool`.

        Args:
            config: How to balance, and how long to wait.
            pool: The replicas.
            tuning: Constants.
            security: Credentials for calls to replicas.
            clock: Seconds; monotonic.
        """
        self.balancer: Balancer = make_balancer(config.balancing, tuning)
        self.num_waiting = 0
        """Calls in the wait queues."""
        self.num_waiting_bytes = 0
        """Memory of their requests."""
        self._config = config
        self._pool = pool
        self._tuning = tuning
        self._clock = clock
        self.present = PresentReplicas(tuning, security)
        """The replicas; read only."""
        self.replicas = self.present.slots
        """The slots of each replica; read only."""
        self.view = self.present.view
        """The replicas as balancing sees them."""
        self._orders = itertools.count(1)
        self._queues: dict[Need, WaitQueue[Slot]] = {}
        """Queues by need, so that no call waits behind one with other needs. None is empty."""
        pool.on_change = self._follow
        pool.on_lease_interval = self._adapt_limits
        self._follow()

    async def aclose(self) -> None:
        """Close the channels of all replicas without running calls."""
        self._pool.on_change, self._pool.on_lease_interval = lambda: 0.0, lambda: None
        await self.present.aclose()

    async def take(self, ticket: Ticket) -> Slot:
        """Return a slot, after waiting for one if needed.

        Raises:
            OverloadedError: the wait queue is full, or all replicas were full or rejected the call for as long as it
                waited. A call that has had a slot may always wait: otherwise its tokens would be lost.
            UnavailableError: no replica could take the call for `wait_for_replica_s`, or for the ticket's own time; for
                a patient call, until its deadline.
            PromptTooLongError: no replica is large enough for it.
            InvalidRequestError: its evaluation has ended.
        """
        self._require_evaluation(ticket.query)
        slot = self._take_now(ticket.query)
        if slot is None and ticket.order == 0:
            self._require_size(ticket.query)
            self._require_room(ticket)
        ticket.order = ticket.order or next(self._orders)
        began = self._clock()
        slot = slot or await self._wait(ticket)
        _WAIT_SECONDS.observe(self._clock() - began)
        return slot

    def is_too_long(self, query: Query) -> bool:
        """Return whether no present replica is large enough for the call."""
        return query.num_tokens > self.present.largest

    def _follow(self) -> float:
        """Synchronise the replicas with their leases, and serve the queues; return what `_serve_queues` returns."""
        sizes = self.present.sizes
        if self.present.follow(self._pool):  # dissolve the queues of calls whose needs have changed
            for need in list(self._queues):
                if self.present.sizes != sizes or (need[-1] and need[-1] not in self.replicas):
                    self._queues.pop(need).dissolve()
        return self._serve_queues()

    def _adapt_limits(self) -> None:
        for replica in self.replicas.values():
            replica.adapt_limit()
        self._serve_queues()

    def _on_release(self, replica: ReplicaSlots) -> None:
        self.present.close_if_unused(replica)
        if self._queues:
            is_paired = replica.lease.role in PD_ROLES  # its partners have a free slot, too
            self._serve_queues("" if is_paired else replica.replica_id)

    def _require_evaluation(self, query: Query) -> None:
        """Refuse a call of an evaluation that has ended, perhaps with its trainer: its version will not come back."""
        exact, pool = query.exact_version, self._pool
        if 0 < exact < pool.published_version and exact != pool.held_out.policy_version:
            raise InvalidRequestError(
                f"exact_policy_version = {exact}, but version {pool.published_version} is published, and no replica is "
                "held out at the other; the evaluation has ended"
            )

    def _require_size(self, query: Query) -> None:
        """Refuse a new call that is too large. A call that has been with a replica may wait for another as large."""
        if self.is_too_long(query) and not query.excluded:
            raise PromptTooLongError(
                f"a prompt of {query.num_tokens - 1} ids is too long: the largest replica takes {self.present.largest} "
                "tokens, the response included; shorten it, or start a replica with a larger rollout.context_length"
            )

    def _require_room(self, ticket: Ticket) -> None:
        config = self._config
        if self.num_waiting >= config.max_waiting:
            raise OverloadedError(
                f"router.max_waiting = {config.max_waiting} calls wait for a replica already; send fewer at once, add "
                "replicas or raise it"
            )
        if self.num_waiting_bytes + ticket.size_bytes > self._tuning.max_waiting_bytes:
            raise OverloadedError(
                f"the requests that wait for a replica take {self.num_waiting_bytes} bytes, and "
                f"{ticket.size_bytes} more exceed the {self._tuning.max_waiting_bytes} that may wait; send fewer at "
                "once, or add replicas"
            )

    def _take_now(self, query: Query) -> Slot | None:
        """Return a free slot; None if there is none, or if calls already wait for it."""
        self._bind(query)
        must_wait = self._measure(query)
        return None if must_wait or query.need in self._queues else self._choose(query)

    def _measure(self, query: Query) -> bool:
        """Note what the call needs, its home included; return whether it must wait there."""
        query.num_small = bisect.bisect_left(self.present.sizes, query.num_tokens)
        query.home, is_full = self.balancer.find_home(query, self.view, self._clock())
        return is_full

    def _bind(self, query: Query) -> None:
        """Bind the query to the current pool: the versions of an evaluation, or those inside the staleness bound."""
        query.wants_unified = query.reports_prompt and self.view.has_unified(query.num_tokens)
        if query.exact_version:
            query.min_version = query.exact_version
            query.wants_held_out = self._pool.held_out.policy_version > 0
        else:
            query.min_version = max(query.min_version, self._pool.min_version)

    def _choose(self, query: Query) -> Slot | None:
        self._bind(query)
        chosen = self.balancer.choose(query, self.view, now := self._clock())
        if chosen is None:
            return None
        self.balancer.record(query, chosen.replica_id)
        replica = self.replicas[chosen.replica_id]
        if chosen.partner_ids is None:
            return Slot(replica, self._on_release, self._clock)
        partner = self.view.find_partner(chosen, query, now)
        assert partner is not None, "a prefill replica is fit only with a partner"
        prefill = Slot(replica, self._on_release, self._clock)
        decode = self.replicas[partner.replica_id]
        return Slot(decode, self._on_release, self._clock, prefill=prefill, bootstrap=_bootstrap(replica.lease))

    def _serve_queues(self, freed: str = "") -> float:
        """Give free slots to waiting calls; only the head of each queue is considered.

        Returns the seconds of processor time that it spent on calls which got a slot.

        Calls whose session or group has begun come first: they wait for one replica, and a new group would only take
        their slots. Among the others the oldest is first. Remaining slots go to calls that wait for another replica.

        Args:
            freed: Only this replica has a new free slot; empty: any may.
        """
        heads = [self._rank(need) for need in self._queues if not freed or need[-1] in ("", freed)]
        heapq.heapify(heads)
        served_s = 0.0
        while heads:
            *_, need = heapq.heappop(heads)
            began = time.thread_time()
            if self._serve_head(need):
                served_s += time.thread_time() - began
                if need in self._queues:
                    heapq.heappush(heads, self._rank(need))
        if freed in self.replicas and self.replicas[freed].has_free_slot:
            self._serve_elsewhere()
        return served_s

    def _serve_elsewhere(self) -> None:
        """Let the call that has waited longest for its own replica go elsewhere, and then the rest of its group.

        Used when a free slot is left over, because calls do not wait beside one.
        """
        begun = [need for need in self._queues if need[-1]]
        need = min(begun, key=lambda need: self._queues[need].head().ticket.order, default=None)
        while need in self._queues and self._serve_head(need):
            pass

    def _serve_head(self, need: Need) -> bool:
        """Give a slot to the head of a queue if possible; return whether it got one."""
        now, queue = self._clock(), self._queues[need]
        query = queue.head().ticket.query
        slot = self._choose(query)
        queue.check(now, is_starved=slot is None and self._is_starved(query, now))
        if slot is None:
            return False
        queue.serve(slot)
        if not queue:
            del self._queues[need]
        return True

    def _rank(self, need: Need) -> tuple[bool, int, Need]:
        """Return the sort key of queues; smaller keys are served first."""
        return not need[-1], self._queues[need].head().ticket.order, need

    def _is_starved(self, query: Query, now: float) -> bool:
        """Return whether no replica is merely busy, with calls or a push that will end."""
        return all(self.view.find_reason(each, query, now) not in TRANSIENT for each in self.view.replicas.values())

    async def _wait(self, ticket: Ticket) -> Slot:
        self.num_waiting += 1
        self.num_waiting_bytes += ticket.size_bytes
        try:
            while (slot := await self._wait_in_queue(ticket)) is None:
                ticket.query.excluded = frozenset()
                self._measure(ticket.query)
            return slot
        finally:
            self.num_waiting -= 1
            self.num_waiting_bytes -= ticket.size_bytes

    async def _wait_in_queue(self, ticket: Ticket) -> Slot | None:
        """Return the call's slot, or None when it must be measured and queued again.

        Raises:
            PenstockError: waiting no longer makes sense.
        """
        waiter, need = Waiter[Slot](ticket), ticket.query.need
        queue = self._queues.setdefault(need, WaitQueue())
        queue.join(waiter)
        self._serve_head(need)
        starved_s = queue.starved_s
        try:
            patience_s = self._patience_s(ticket, is_starved=queue.is_starved)
            if patience_s <= 0 and not waiter.slot.done():
                raise _gave_up(ticket, self.view.explain(ticket.query, queue.checked_at))
            await asyncio.wait((waiter.slot,), timeout=patience_s)
            if not waiter.slot.done() and self._queues.get(need) is queue:
                self._serve_head(need)
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled():
                waiter.slot.result().release()
            raise
        finally:
            ticket.waited_s += queue.starved_s - starved_s
            queue.leave(waiter)
            if not queue and self._queues.get(need) is queue:
                del self._queues[need]
        return None if waiter.slot.cancelled() else waiter.slot.result()

    def _patience_s(self, ticket: Ticket, *, is_starved: bool) -> float:
        """Return the seconds to wait before the next check; 0 or less: stop waiting."""
        wait_s = max(self._config.wait_for_replica_s, ticket.wait_s)
        allowed_s = math.inf if ticket.is_patient else wait_s - ticket.waited_s
        if not is_starved and (allowed_s > 0 or ticket.waited_s == 0):
            # Check often, so that a pool that becomes unusable is noticed before most of the time is over.
            allowed_s = min(max(allowed_s, _RECHECK_SOON_S), _RECHECK_S)
        left_s = min(ticket.deadline - self._clock() - self._tuning.time_to_answer_s, allowed_s)
        return min(left_s, REJECT_PAUSE_S) if ticket.query.excluded else left_s


def _bootstrap(prefill: common_pb2.Replica) -> generate_pb2.Bootstrap:
    """Return how both peers of a call find each other, in a room of their own."""
    described = prefill.disaggregation
    return generate_pb2.Bootstrap(
        host=described.bootstrap_host,
        port=described.bootstrap_port,
        room=secrets.randbits(62),
        policy_version=prefill.policy_version,
    )


def _gave_up(ticket: Ticket, why: NoReplica) -> PenstockError:
    last = f"; the last rejection: {ticket.last_error}" if ticket.last_error is not None else ""
    if UnroutableReason.FULL in why.reasons:
        return OverloadedError(f"no slot became free in time: {why}{last}")
    is_overload = isinstance(ticket.last_error, OverloadedError) or (
        ticket.last_error is None and UnroutableReason.REJECTING in why.reasons
    )
    kind = OverloadedError if is_overload else UnavailableError
    return kind(f"no replica could take the request within {ticket.waited_s:.1f} s: {why}{last}")
