"""Engines that join a run late: real SGLang is brought to the published version, from a snapshot or over a group."""

import contextlib
import random
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import connect
from penstock.config import BusConfig
from penstock.v1 import common_pb2
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.engine_process import EngineProcess, engine_process, log_events
from services.trainer.weight_sync.publisher import WeightPublisher
from tests.support.engine.adapters import with_adapters
from tests.support.engine.publisher import engine_publisher
from tests.support.engine.reference import TOLERANCE, Reference, picture, prompt, request, until_replica
from tests.support.waiting import until
from tests.support.weights.publishing import kept_current, watching

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
    pytest.mark.leaves_behind("SGLang leaves the files of its sockets in TMPDIR", "file"),
]


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


@pytest.mark.slow
async def test_engines_that_join_late(
    tiny_model_path: Path, nats_url: str, tmp_path: Path, reference: Reference
) -> None:
    """They load the version that was published before they were there from the snapshot, the next ones all other ways.

    A group, this machine's memory, a stream of all and one of what changed; real SGLang has the policy's logprobs each
    time. One engine is a process, the other's layers are shared by two; what changed is sent to the first alone. The
    last versions are adapters, which both merge into what they hold. kill -9 of an engine takes all its processes.
    """
    bus_config = BusConfig(url=nats_url, lease_ttl_s=30.0)  # it does not lapse while the machine is busy
    async with connect(bus_config, run=tmp_path.name) as bus, contextlib.AsyncExitStack() as stack:
        watch = await stack.enter_async_context(watching(bus))

        async def publisher_of(transport: str, files_dir: Path | None = None) -> WeightPublisher:
            made = engine_publisher(watch, files_dir=files_dir, mode="in_place", transport=transport)
            return await stack.enter_async_context(made)

        publisher = await publisher_of("broadcast", tmp_path / "weights")
        policies = {version: reference.perturbed(version) for version in range(7, 12)}
        await publisher.publish(publisher.take(7, NamedWeights.of(policies[7].weights)))
        async with kept_current(publisher):
            settings = {"max_running": 8, "context_length": 512, "grace_s": 1.0, "lease_ttl_s": bus_config.lease_ttl_s}
            engines = []
            for num_ranks in (1, 2):
                folder = tmp_path / f"of-{num_ranks}"
                folder.mkdir()
                engines.append(
                    await stack.enter_async_context(
                        engine_process(
                            tiny_model_path, nats_url, folder, run=tmp_path.name, tensor_parallel=num_ranks, **settings
                        )
                    )
                )
            for engine in engines:
                await assert_serves(engine, policies[7], 7)
        broadcast, memory, delta = [await publisher_of(name) for name in ("broadcast", "shared_memory", "delta")]
        with capture_logs() as events:
            for version, publisher in ((8, broadcast), (9, memory), (10, delta), (11, delta)):
                report = await publisher.publish(publisher.take(version, NamedWeights.of(policies[version].weights)))
                assert (report.num_replicas, report.num_failed) == (2, 0)
                for engine in engines:
                    await assert_serves(engine, policies[version], version)
            base = policies[11]
            for version, publisher in ((12, memory), (13, broadcast), (14, delta), (15, delta)):
                pushed, policy = with_adapters(base, seed=version)
                report = await publisher.publish(publisher.take(version, pushed))
                assert (report.num_replicas, report.num_failed) == (2, 0)
                for engine in engines:
                    await assert_serves(engine, policy, version)
        assert "push.fell_back" not in {event["event"] for event in events}  # what changed goes to the first alone
        for engine in engines:
            received = [event["transport"] for event in log_events(engine.log) if event["event"] == "weights.received"]
            whole = ["disk", "broadcast", "shared_memory", "delta", "delta"]
            assert received == [*whole, "shared_memory", "broadcast", "delta", "delta"]
        children = [each for engine in engines for each in psutil.Process(engine.process.pid).children(recursive=True)]
        assert len(children) >= 2 + 3, "each has a detokenizer and a scheduler for each rank"
        for engine in engines:
            engine.process.kill()
            await engine.process.wait()
        await until(lambda: not any(each.is_running() for each in children))
