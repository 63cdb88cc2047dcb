"""Plays an evaluation on queues that no run uses, with engines and workers that serve one model."""

import asyncio
import uuid
from collections.abc import Collection, Mapping

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Consumer, Delivery, consuming
from penstock.errors import CorruptMessageError
from penstock.records import Group, GroupId
from penstock.records.codec import decode
from penstock.runtime.process import end_task
from services.trainer.evaluation.evaluation import Evaluation, OnPlayed
from services.trainer.evaluation.sets import EvaluationSet
from services.trainer.telemetry.episodes.evaluated import keeping
from services.trainer.telemetry.episodes.log import EpisodeLog

_CONSUMER = "evaluation"
_ACK_WAIT_S = 60.0
_MAX_IN_HAND = 10_000
_FETCH_LIMIT = 64


async def play_on_bus(
    sets: Mapping[str, EvaluationSet],
    bus: Bus,
    *,
    version: int,
    on_played: OnPlayed,
    played: Collection[tuple[str, int]] = (),
    episodes: EpisodeLog | None = None,
) -> None:
    """Play every row of `sets` and return when each has an outcome.

    Args:
        sets: Sets to play.
        bus: The bus; its queues are emptied first.
        version: The policy version that the engines serve.
        on_played: Awaited with each row's outcome.
        played: Rows to leave out, by set and number.
        episodes: Keeps groups for people to read; None: none are kept.

    Raises:
        DataError: a row cannot be read or sent, or no row of a set can be played.
        SetupError: NATS is not set up as the evaluation needs it.
    """
    await bus.ensure_streams()
    images = ImageStore(bus)
    await images.ensure()
    for stream in (bus.prompts, bus.groups):
        await bus.purge(stream)
    epoch = uuid.uuid4().hex[:8]
    async with consuming(
        bus, bus.groups, _CONSUMER, ack_wait_s=_ACK_WAIT_S, max_ack_pending=_MAX_IN_HAND, fresh=True
    ) as consumer:

        async def has_received_all() -> bool:
            return await consumer.has_delivered_all() and consumer.num_in_hand == 0

        evaluation = Evaluation(
            sets,
            bus=bus,
            images=images,
            run_id=f"evaluation-{epoch}",  # each start counts the rows that are left from 0
            epoch=epoch,
            version=version,
            on_played=on_played,
            has_received_all=has_received_all,
            played=played,
            on_group=None if episodes is None else keeping(episodes, sets, images, step=0, version=version),
        )
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(_collect(consumer, evaluation))
            await evaluation.run()
            await end_task(collecting)


async def _collect(consumer: Consumer, evaluation: Evaluation) -> None:
    while True:
        for delivery in await consumer.fetch(_FETCH_LIMIT):
            await _receive(delivery, evaluation)
            await delivery.ack()


async def _receive(delivery: Delivery, evaluation: Evaluation) -> None:
    try:
        await evaluation.receive(decode(delivery.payload, Group))
    except CorruptMessageError as error:
        if (group_id := GroupId.parse(delivery.message_id)) is not None:
            await evaluation.fail(group_id, str(error))
