"""A client that takes a large message slowly, or stands still for a while, gets it whole."""

import asyncio
import json
import os
import uuid

import pytest
from nats.js import api

from penstock.bus.connection import Bus

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
