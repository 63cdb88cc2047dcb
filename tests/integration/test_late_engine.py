"""An engine that joins a run late: real SGLang is brought to the published version, from a snapshot or over a group."""

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from penstock.bus.connection import connect
from penstock.bus.leases import watched
from penstock.config import BusConfig
from penstock.v1 import common_pb2
from services.trainer.config import PushConfig
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.publisher import WeightPublisher
from services.trainer.push.snapshots import Snapshots
from tests.engine_process import EngineProcess, engine_process, log_events
from tests.engine_reference import TOLERANCE, Reference, picture, prompt, request, until_replica

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


async def assert_serves(engine: EngineProcess, policy: Reference, version: int) -> None:
    """READY at `version`, and its tokens have the policy's logprobs, for a picture too."""
    await until_replica(
        engine,
        lambda replica: (replica.policy_version, replica.state) == (version, common_pb2.REPLICA_STATE_READY),
        timeout_s=60,
    )
    images = [picture(150, 101, seed=1)]
    ids = prompt(random.Random(version), num_images=1, image_id=policy.image_id)
    answer = await engine.generation.Generate(request(ids, images), timeout=60)
    expected, _ = policy.logprobs(ids, images, answer.output_ids, temperature=1.0)
    assert max(abs(got - want) for got, want in zip(answer.logprobs, expected.tolist(), strict=True)) < TOLERANCE


async def test_an_engine_that_joins_late(
    tiny_model_path: Path, nats_url: str, tmp_path: Path, reference: Reference
) -> None:
    """It loads the version that was published before it was there from the snapshot; then a group, then a delta."""
    config = PushConfig(mode="in_place", bucket_bytes=1 << 16)

    def taken(policy: Reference, version: int) -> PublishedWeights:
        return PublishedWeights.take(version, policy.weights.items(), max_bucket_bytes=config.bucket_bytes)

    bus_config = BusConfig(url=nats_url)
    async with connect(bus_config, run=tmp_path.name) as bus, contextlib.AsyncExitStack() as stack:
        bucket = await bus.bucket("replicas", ttl_s=bus_config.lease_ttl_s)
        watch = await stack.enter_async_context(watched(bucket, ttl_s=bus_config.lease_ttl_s))
        publisher = WeightPublisher(
            config=config, replicas=watch, backend="gloo", snapshots=Snapshots(tmp_path / "snapshots", with_deltas=True)
        )
        stack.push_async_callback(publisher.close)
        policies = {version: reference.perturbed(version) for version in (7, 8, 9, 10)}
        await publisher.publish(taken(policies[7], 7))
        keeping = asyncio.create_task(publisher.keep_current())
        try:
            settings = {"max_running": 8, "context_length": 512, "grace_s": 1.0}
            engine = await stack.enter_async_context(engine_process(tiny_model_path, nats_url, tmp_path, **settings))
            await assert_serves(engine, policies[7], 7)
            for version in (8, 9, 10):
                if version == 10:
                    async with asyncio.timeout(30):
                        while publisher.snapshots.newest(9) is None:
                            await asyncio.sleep(0.05)
                    publisher.config = config.model_copy(update={"transport": "delta"})
                report = await publisher.publish(taken(policies[version], version))
                assert (report.num_replicas, report.num_failed) == (1, 0)
                await assert_serves(engine, policies[version], version)
            received = [event for event in log_events(engine.log) if event["event"] == "weights.received"]
            assert [event["is_snapshot"] for event in received] == [True, False, False, True]
            assert [event["is_delta"] for event in received] == [False, False, False, True]
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
