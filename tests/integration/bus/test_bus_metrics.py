"""What Prometheus sees of the streams, on a real nats-server."""

import contextlib
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from penstock.bus import metrics
from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.bus.metrics import BusMetrics
from penstock.config import BusConfig
from tests.support.bus.work_queue import OpenConsumer, fetch_one
from tests.support.waiting import HANG_S


async def values(bus: Bus) -> dict[tuple[str, str], float]:
    """The values by metric and stream."""
    found: list[Metric] = [*(await BusMetrics(bus).read())]
    return {
        (sample.name.removeprefix("penstock_bus_"), sample.labels.get("stream", "")): sample.value
        for metric in found
        for sample in metric.samples
    }


async def test_queues_tell_what_waits_and_what_is_in_hand(
    workers: OpenConsumer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the stream's kind, without the run's name."""
    monkeypatch.setattr(metrics, "_TIMEOUT_S", HANG_S)
    for name in ("a", "b", "c"):
        await bus.publish(bus.prompts, name.encode(), message_id=name)
    consumer = await workers(bus, ack_wait_s=60.0)
    delivery = await fetch_one(consumer)
    found = await values(bus)
    assert found["reachable", ""] == 1
    assert found["messages", "prompts"] == 3
    assert found["bytes", "prompts"] > 0
    assert (found["pending_messages", "prompts"], found["messages_in_hand", "prompts"]) == (2, 1)
    assert (found["messages", "groups"], found["messages", "dead"]) == (0, 0)
    await delivery.ack()
    assert (await values(bus))["messages", "prompts"] == 2


async def test_a_server_that_is_away_is_a_value(tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is there, without the streams."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path))
        async with connect(BusConfig(url=url), run=run_name) as bus:
            await bus.ensure_streams()
            with monkeypatch.context() as patient:
                patient.setattr(metrics, "_TIMEOUT_S", HANG_S)
                assert (await values(bus))["messages", "prompts"] == 0
            await server.aclose()
            assert await values(bus) == {("reachable", ""): 0}
