"""The workers' queue, and what tests do with its messages."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import Consumer, Delivery
from tests.support.waiting import HANG_S

OpenConsumer = Callable[..., Awaitable[Consumer]]


async def fetch_one(consumer: Consumer) -> Delivery:
    async with asyncio.timeout(HANG_S):
        while True:
            for delivery in await consumer.fetch(1):
                return delivery


async def num_messages(bus: Bus, stream: str) -> int:
    return (await bus.jetstream.stream_info(stream)).state.messages


async def until_beaten(bus: Bus, num_beats: int) -> None:
    """Wait for heartbeats of the workers' consumer; there are three in the time of an ack wait."""
    beats = await bus.client.subscribe(f"$JS.ACK.{bus.prompts.name}.workers.>")
    for _ in range(num_beats):
        assert (await beats.next_msg(HANG_S)).data == b"+WPI"
    await beats.unsubscribe()
