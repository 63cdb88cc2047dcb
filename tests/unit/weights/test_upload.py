"""Uploads arrive before the pause, complete and undamaged, and a failed one touches nothing."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import REPLICA_STATE_READY
from services.rollout.engine.sglang_plugin.transports import DeltaTransport
from tests.support.weights.recorded_sink import DIGESTS, MANIFEST, RecordedSink, finish, group, push, receiver


def chunks_of(data: bytes, size: int = 3, **changed: Any) -> AsyncIterator[rollout_pb2.SendWeightsRequest]:
    """An upload."""

    async def send() -> AsyncIterator[rollout_pb2.SendWeightsRequest]:
        for first in range(0, len(data), size):
            part = data[first : first + size]
            fields = {"data": part, "crc32": zlib.crc32(part)} | changed
            yield rollout_pb2.SendWeightsRequest(**fields)

    return send()


async def test_a_stream_is_taken_before_the_pause() -> None:
    """Into a file that the sink can read until the push has ended, and that is gone then."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 1)
    sink.calls.clear()
    await one.prepare("p2", 2, rollout_pb2.DeltaSource(base_version=1, size_bytes=8), MANIFEST, deadline_s=30.0)
    with pytest.raises(NotReadyError, match="before the pause"):
        await one.pause("p2")
    assert await one.upload("p2", chunks_of(b"12345678")) == 8
    assert (one.state, sink.calls) == (REPLICA_STATE_READY, [])
    for stage in (one.pause, one.receive):
        await stage("p2")
    (transport,) = sink.transports[1:]
    assert isinstance(transport, DeltaTransport)
    assert (transport.base_version, Path(transport.path).read_bytes()) == (1, b"12345678")
    await one.verify("p2", DIGESTS)
    await one.commit("p2")
    assert not Path(transport.path).exists()
    assert one.version == 2


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        (lambda: chunks_of(b"1234567"), "7 of 8 announced bytes"),
        (lambda: chunks_of(b"123456789"), "more than the 8 announced bytes"),
        (lambda: chunks_of(b"12345678", crc32=1), "damaged after 0 bytes"),
    ],
)
async def test_an_upload_that_is_not_what_was_announced(chunks: Any, match: str) -> None:
    """Ends the push before anything was touched or paused."""
    sink = RecordedSink()
    one = await receiver(sink)
    await one.prepare("p1", 1, rollout_pb2.DeltaSource(size_bytes=8), MANIFEST, deadline_s=30.0)
    with pytest.raises((InvalidRequestError, UnavailableError), match=match):
        await one.upload("p1", chunks())
    assert (one.state, sink.calls) == (REPLICA_STATE_READY, [])
    with pytest.raises(NotReadyError, match="prepare it first"):
        await one.pause("p1")
    await push(one, "p2", 1)


async def test_an_upload_that_hangs_ends_at_the_deadline() -> None:
    """Generation never stopped, and the next push is taken."""
    sink = RecordedSink()
    one = await receiver(sink)

    async def hang() -> AsyncIterator[rollout_pb2.SendWeightsRequest]:
        await asyncio.Event().wait()
        yield rollout_pb2.SendWeightsRequest()

    source = rollout_pb2.DeltaSource(size_bytes=3)
    await one.prepare("p1", 1, source, MANIFEST, deadline_s=0.2)
    with pytest.raises((DeadlineError, UnavailableError)):
        await one.upload("p1", hang())
    assert (one.state, sink.calls) == (REPLICA_STATE_READY, [])
    await one.prepare("p2", 1, source, MANIFEST, deadline_s=30.0)
    await one.upload("p2", chunks_of(b"abc"))
    await finish(one, "p2")


@pytest.mark.parametrize("base_version", [1, 3])
async def test_a_delta_against_another_version_is_refused(base_version: int) -> None:
    """Before it is sent; so is one against weights that are broken, and an upload to a push that comes another way."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 2)
    with pytest.raises(NotReadyError, match=f"changes version {base_version}, but this engine holds version 2"):
        await one.prepare(
            "p2", 4, rollout_pb2.DeltaSource(base_version=base_version, size_bytes=8), MANIFEST, deadline_s=30.0
        )
    await one.prepare("p3", 3, group(), MANIFEST, deadline_s=30.0)
    with pytest.raises(InvalidRequestError, match="uses transport broadcast"):
        await one.upload("p3", chunks_of(b""))
    sink.fail_at = "load b"
    with pytest.raises(UnavailableError):
        await push(one, "p4", 3)
    with pytest.raises(NotReadyError, match="holds broken weights"):
        await one.prepare("p5", 3, rollout_pb2.DeltaSource(base_version=2, size_bytes=8), MANIFEST, deadline_s=30.0)
