"""Turns a prompt message into a group message.

Invariant: `handle` returns only after the group is stored, so the prompt is acked last. The group's message id is the
prompt's, so a redelivered prompt never stores a second group.
"""

import structlog

from penstock.bus.connection import Bus
from penstock.bus.consumer import Delivery
from penstock.errors import CorruptMessageError
from penstock.records import Group, Prompt
from penstock.records.codec import decode, encode
from services.rollout.worker import metrics
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
        prompt = decode(delivery.payload, Prompt)
        await self._publish(await self._rollout.play(prompt, num_deliveries=delivery.num_delivered))

    async def give_up(self, delivery: Delivery, reason: str) -> None:
        """Report to the trainer that the group has no samples, and why."""
        metrics.GROUPS.labels("given_up").inc()
        try:
            prompt = decode(delivery.payload, Prompt)
        except CorruptMessageError:
            # Without a prompt there is no group to report, but the message id still names the one that will not come.
            await self._bus.publish(self._bus.groups, delivery.payload, message_id=delivery.message_id)
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
        is_new = await self._bus.publish(self._bus.groups, encode(group), message_id=message_id)
        log.info("group.published", group=message_id, is_new=is_new, error=group.error or None)
