"""A client that takes large messages slowly, or stands still for a while, gets each whole, and once."""

import asyncio
import json
import os
import uuid

import pytest
from nats.js import api

from penstock.bus.connection import Bus, connect
from penstock.bus.image_store import ImageStore
from penstock.config import BusConfig
from tests.support.cuttable_link import CuttableLink

_STILL_S = 11.0
"""Longer than NATS' own `write_deadline` of 10 s, after which it would close the connection."""


@pytest.mark.slow
async def test_a_client_that_stands_still_within_a_message_gets_the_rest(bus: Bus, nats_url: str) -> None:
    """As on a link that needs so long for the message, or as a process that is frozen; NATS' default cuts it off, at
    each delivery, so that a large group would never arrive."""
    size, consumer, inbox = 30 * 2**20, uuid.uuid4().hex, uuid.uuid4().hex
    await bus.ensure_streams()
    await bus.publish(bus.groups, os.urandom(size), message_id="large")
    await bus.jetstream.add_consumer(
        bus.groups.name, api.ConsumerConfig(durable_name=consumer, ack_policy=api.AckPolicy.EXPLICIT)
    )
    host, _, port = nats_url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    try:
        options = {"verbose": False, "pedantic": False, "protocol": 1, "headers": True}
        request = json.dumps({"batch": 1, "expires": 60_000_000_000})
        writer.write(f"CONNECT {json.dumps(options)}\r\nSUB {inbox} 1\r\n".encode())
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{bus.groups.name}.{consumer}"
        writer.write(f"PUB {subject} {inbox} {len(request)}\r\n{request}\r\n".encode())
        await reader.readexactly(2**20)
        await asyncio.sleep(_STILL_S)  # what the test is about: NATS has no clock that could be moved
        await asyncio.wait_for(reader.readexactly(size - 2**20), 30.0)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.slow
async def test_images_that_a_link_takes_long_for_travel_once(bus: Bus, run_name: str, nats_url: str) -> None:
    """Longer than any server needs for an answer. Given up and asked for again, each would make the others later."""
    images = [os.urandom(2**20) for _ in range(5)]
    store = ImageStore(bus)
    await store.ensure()
    names = [await store.put("run.0.0.a", image) for image in images]
    async with CuttableLink.to(nats_url) as link, connect(BusConfig(url=link.url), run=run_name) as far:
        link.bytes_per_s = 2**19
        reader = ImageStore(far)
        async with asyncio.timeout(120.0):
            assert await asyncio.gather(*(reader.wait_for("run.0.0.a", name) for name in names)) == images
        assert link.num_bytes < sum(map(len, images)) + 2**19
