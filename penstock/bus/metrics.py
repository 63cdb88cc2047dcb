"""What waits on the bus, for Prometheus."""

import asyncio
from collections.abc import Iterable

from prometheus_client.core import Metric

from penstock.bus.connection import Bus
from penstock.bus.stored.stream_report import StreamReport, report_streams
from penstock.errors import UnavailableError
from penstock.telemetry import metrics

_REACHABLE = metrics.reading("penstock_bus_reachable", "1 if NATS answers the trainer, else 0.")
_MESSAGES = metrics.reading("penstock_bus_messages", "Messages in a stream of the run.", ("stream",))
_BYTES = metrics.reading("penstock_bus_bytes", "Size of the messages in a stream of the run.", ("stream",))
_PENDING = metrics.reading(
    "penstock_bus_pending_messages", "Messages of a queue that no process has been given.", ("stream",)
)
_IN_HAND = metrics.reading(
    "penstock_bus_messages_in_hand", "Messages of a queue that a process was given and has not acked.", ("stream",)
)
_REDELIVERED = metrics.reading(
    "penstock_bus_redelivered_messages", "Of those, messages that had been given out before.", ("stream",)
)
_TIMEOUT_S = 2.0


class BusMetrics:
    """Reads the streams of a run."""

    def __init__(self, bus: Bus) -> None:
        """Read those of `bus`."""
        self._bus = bus

    async def read(self) -> Iterable[Metric]:
        """Return the size of each stream, and what waits in the work queues of prompts and groups."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                streams = await report_streams(self._bus, with_ages=False)
        except (UnavailableError, TimeoutError):
            return [_REACHABLE.of(0)]
        queues = (self._bus.prompts.name, self._bus.groups.name)  # each has one consumer, shared by its processes
        waiting = {_kind(stream): stream.consumers for stream in streams if stream.name in queues}
        return [
            _REACHABLE.of(1),
            _MESSAGES.by({_kind(stream): stream.num_messages for stream in streams}),
            _BYTES.by({_kind(stream): stream.size_bytes for stream in streams}),
            _PENDING.by({kind: sum(each.num_pending for each in consumers) for kind, consumers in waiting.items()}),
            _IN_HAND.by({kind: sum(each.num_in_hand for each in consumers) for kind, consumers in waiting.items()}),
            _REDELIVERED.by(
                {kind: sum(each.num_redelivered for each in consumers) for kind, consumers in waiting.items()}
            ),
        ]


def _kind(stream: StreamReport) -> tuple[str]:
    """Return a stream's name without its run's, such as prompts."""
    return (stream.name.rpartition("_")[2].lower(),)
