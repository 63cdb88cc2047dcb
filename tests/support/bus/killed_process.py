"""Works on a queue, and is killed by one of its messages: `python -m tests.support.bus.killed_process BUS RUN START`.

`kills` kills the process, whose messages then come again in a second, not after the ack wait. In the first three starts
it waits for the other two to be handled beside it, and those never end; later they end if they are handled alone. The
process ends with 0 once the queue is empty.
"""

import asyncio
import os
import signal
import sys

from penstock.bus.connection import connect
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.bus.work_queue.work_loop import work
from penstock.config import BusConfig
from tests.support.bus.work_queue import num_messages
from tests.support.waiting import until


async def main(url: str, run: str, start: int) -> None:
    num_handling = 0
    fetched: list[Delivery] = []
    async with (
        connect(BusConfig(url=url), run=run) as bus,
        consuming(bus, bus.prompts, "workers", ack_wait_s=600.0, max_ack_pending=100) as consumer,
    ):
        fetch, stop = consumer.fetch, asyncio.Event()

        async def fetch_and_note(limit: int) -> list[Delivery]:
            found = await fetch(limit)
            fetched.extend(found)
            return found

        async def handle(delivery: Delivery) -> None:
            nonlocal num_handling
            num_handling += 1
            if delivery.payload == b"kills":
                await until(lambda: num_handling == 3 or start > 3)
                for each in fetched:
                    await each.put_back(1.0)  # not to this process, which is still asking
                await bus.client.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if start <= 3 or num_handling > 1:
                await asyncio.Event().wait()
            await bus.publish(bus.groups, delivery.payload, message_id=delivery.message_id)
            num_handling -= 1

        async def is_empty() -> bool:
            return await num_messages(bus, bus.prompts.name) == 0

        consumer.fetch = fetch_and_note  # type: ignore[method-assign]
        working = asyncio.create_task(work(consumer, handle, stop=stop, concurrency=4, max_deliveries=20))
        await until(is_empty)
        stop.set()
        await working


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
