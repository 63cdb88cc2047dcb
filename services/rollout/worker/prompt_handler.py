"""Turns a prompt message into a group message.

Invariant: `handle` returns only after the group is stored and the group's environments are closed, so the prompt is
acked last. The group's message id is the prompt's, so a redelivered prompt never stores a second group.
"""

import asyncio
import time

import structlog

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import Delivery
from penstock.errors import CorruptMessageError
from penstock.records import Group, Prompt
from penstock.records.codec import decode, encode
from penstock.telemetry import spans
from services.rollout.worker import metrics
from services.rollout.worker.closings import Closings
from services.rollout.worker.group_rollout import GroupRollout

log = structlog.get_logger()


class PromptHandler:
    """Takes prompts from the bus and publishes their groups."""

    def __init__(self, bus: Bus, rollout: GroupRollout, *, worker_id: str) -> None:
        """Play with `rollout` and publish on `bus`."""
        self._bus = bus
        self._rollout = rollout
        self._worker_id = worker_id

    async def handle(self, delivery: Delivery) -> None:
        """Play the delivered prompt and store its group."""
        received = time.monotonic()
        prompt = decode(delivery.payload, Prompt)
        queued_s = max(0.0, time.time() - delivery.stored_at)
        spans.record("group.queued", received - queued_s, received, group=prompt.id.message)
        with structlog.contextvars.bound_contextvars(group=prompt.id.message):
            is_stored = False
            try:
                async with Closings() as closings:  # around both, because a group does not wait for its environments
                    group = await self._rollout.play(prompt, closings, num_deliveries=delivery.num_delivered)
                    await self._publish(group)
                    is_stored = True
            except asyncio.CancelledError:
                if not is_stored:
                    raise  # else the worker stops while environments close, and nobody needs to play the group again

    async def give_up(self, delivery: Delivery, reason: str) -> None:
        """Report to the trainer that the group has no samples, and why."""
        try:
            prompt = decode(delivery.payload, Prompt)
        except CorruptMessageError:
            # Without a prompt there is no group to report, but the message id still names the one that will not come.
            await self._bus.publish(self._bus.groups, delivery.payload, message_id=delivery.message_id)
            metrics.GROUPS.labels("given_up").inc()
            return
        await self._publish(
            Group(
                id=prompt.id,
                purpose=prompt.purpose,
                environment=prompt.environment,
                num_samples=prompt.num_samples,
                samples=(),
                worker_id=self._worker_id,
                error=reason,
                num_deliveries=delivery.num_delivered,
            )
        )

    async def _publish(self, group: Group) -> None:
        message_id = group.id.message
        with spans.recorded("group.published", group=message_id) as about:
            payload = encode(group)
            if len(payload) > self._bus.max_payload_bytes(message_id) and group.has_routed_experts:
                smaller = encode(group.without_routed_experts())
                log.warning(
                    "group.experts_left_out",
                    group=message_id,
                    size_bytes=len(payload),
                    size_without_bytes=len(smaller),
                    remedy="a group is one message of at most 32 MiB; lower trainer.samples_per_group or the tokens of "
                    "a sample, or leave trainer.router_replay out",
                )
                payload = smaller
            about["size_bytes"] = len(payload)
            stored = await self._bus.publish(self._bus.groups, payload, message_id=message_id)
            about["is_new"] = stored.is_new
        metrics.GROUPS.labels("lost" if group.is_lost else "given_up" if group.error else "played").inc()
        if group.error:
            log.warning("group.unplayed", group=message_id, error=group.error)
