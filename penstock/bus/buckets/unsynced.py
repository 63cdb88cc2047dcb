"""Streams whose messages are acknowledged before they are on the disk, for what may be lost or soon expires.

Leases are renewed all the time. With `sync_interval: always`, which queues need, nats-server would sync each renewal. A
disk takes only some hundred syncs a second, and the leases of a thousand engines need more. A lease that is lost when
the server crashes is renewed before it would have expired. A stream on several servers cannot be unsynced.
"""

from typing import Any

from nats.js import JetStreamContext, api


class UnsyncedStreams(JetStreamContext):
    """Adds such streams and buckets: `persist_mode` of nats-server 2.12, which older servers ignore."""

    async def add_stream(self, config: api.StreamConfig | None = None, **params: Any) -> api.StreamInfo:
        """Add a stream, as `JetStreamContext.add_stream` does."""
        return await super().add_stream(config, persist_mode=api.PersistMode.ASYNC, **params)
