"""A large message that is on its way when the server falls silent: the client comes back, and can be stopped."""

import asyncio
from pathlib import Path

import nats.errors
from nats.aio.client import Client

from penstock.bus.connection import connect
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.testing.freezing import frozen
from tests.support.cuttable_link import CuttableLink
from tests.support.waiting import promptly, until

_LARGE = bytes(24 * 2**20)
"""More than the kernels of both sides hold."""


def num_unsent(client: Client) -> int:
    """Bytes that nobody takes."""
    return int(client._transport._io_writer.transport.get_write_buffer_size())


async def test_a_connection_that_takes_nothing_more_is_left(tmp_path: Path) -> None:
    """nats-py would first send all of it. The message is stored over another connection."""
    async with (
        local_server(tmp_path) as url,
        CuttableLink.to(url) as link,
        connect(BusConfig(url=link.url), run="r") as bus,
    ):
        await bus.ensure_streams()
        link.silence()
        publishing = asyncio.create_task(bus.publish(bus.groups, _LARGE, message_id="a"))
        await until(lambda: num_unsent(bus.client) > 0)
        await bus.client._process_op_err(nats.errors.StaleConnectionError())  # as when pings are not answered for 30 s
        assert await promptly(publishing)
        assert (await bus.jetstream.stream_info(bus.groups.name)).state.messages == 1


async def test_a_publish_beside_a_frozen_server_can_be_cancelled(tmp_path: Path) -> None:
    """nats-py swallows the cancellation while it flushes; it ends with the attempt, and is not tried again."""
    async with local_server(tmp_path) as url, connect(BusConfig(url=url), run="r") as bus:
        await bus.ensure_streams()
        pid = int((tmp_path / "nats.pid").read_text())
        with frozen(pid):
            publishing = asyncio.create_task(bus.publish(bus.groups, _LARGE, message_id="a"))
            await until(lambda: num_unsent(bus.client) > 0)
            publishing.cancel()
            await promptly(asyncio.wait({publishing}))
            assert publishing.cancelled()
