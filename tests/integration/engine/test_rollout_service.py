"""What an engine's control service refuses, by gRPC: the error names the field."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.errors import InvalidRequestError, UnavailableError
from penstock.rpc.addressee import addressed_to
from penstock.rpc.channel import call, connect
from penstock.rpc.server import RpcServer, service_name
from penstock.v1 import rollout_pb2, rollout_pb2_grpc
from penstock.weights.digest import XXH3
from services.rollout.engine.replica_view import ReplicaView
from services.rollout.engine.rollout_service import RolloutServicer
from tests.support.weights.recorded_sink import DIGESTS, MANIFEST, RecordedSink, close_receivers, group, receiver


class View(ReplicaView):
    """Of an engine without SGLang."""

    def __init__(self) -> None:
        self.replica_id = "engine-1"


@asynccontextmanager
async def engine(sink: RecordedSink) -> AsyncIterator[Any]:
    """The stub of an engine that has the id "engine-1"."""
    undrained: Any = None
    server = RpcServer(host="127.0.0.1", port=0)
    server.add(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        RolloutServicer(await receiver(sink), View(), undrained),
        service_name(rollout_pb2.DESCRIPTOR, "RolloutService"),
    )
    await server.start()
    channel = connect(server.address, None)
    try:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)
    finally:
        await channel.close(None)
        await server.drain(0.0)
        await close_receivers()


def announcement(push_id: str = "p1", **source: Any) -> rollout_pb2.PrepareWeightsRequest:
    return rollout_pb2.PrepareWeightsRequest(
        push_id=push_id, policy_version=1, manifest=MANIFEST.to_proto(), digest=XXH3, deadline_s=30.0, **source
    )


def update(prepare: rollout_pb2.PrepareWeightsRequest) -> rollout_pb2.UpdateWeightsRequest:
    return rollout_pb2.UpdateWeightsRequest(push_id="p1", digests=DIGESTS, prepare=prepare)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (announcement("p2", broadcast=group()), r"prepare\.push_id = 'p2' is not push_id = 'p1'"),
        (announcement(delta=rollout_pb2.DeltaSource(size_bytes=8)), r"prepare\.delta: .*PrepareWeights"),
        (announcement(), "source is missing"),
    ],
)
async def test_an_announcement_that_the_call_cannot_take_is_refused(
    prepare: rollout_pb2.PrepareWeightsRequest, said: str
) -> None:
    """Before anything is asked of the engine."""
    async with engine(sink := RecordedSink()) as stub:
        with pytest.raises(InvalidRequestError, match=said):
            await call(stub.UpdateWeights(update(prepare)).read(), peer="engine-1")
    assert sink.calls == []


async def test_a_push_for_another_engine_is_refused() -> None:
    """One that was at this address before; the engine's own push is taken, and one that names no engine."""
    async with engine(sink := RecordedSink()) as stub:
        for announce in (
            lambda whom: stub.PrepareWeights(announcement(broadcast=group()), metadata=addressed_to(whom)),
            lambda whom: stub.UpdateWeights(
                update(announcement(broadcast=group())), metadata=addressed_to(whom)
            ).read(),
        ):
            with pytest.raises(UnavailableError, match="engine-0 was replaced: engine-1 answers at its address"):
                await call(announce("engine-0"), peer="engine-0")
            assert sink.calls == []
        await call(stub.PrepareWeights(announcement(broadcast=group()), metadata=addressed_to("engine-1")), peer="")
        await call(stub.PrepareWeights(announcement("p3", broadcast=group("g3"))), peer="")
    assert [each for each in sink.calls if each.startswith("join")] == ["join g1", "join g3"]
