"""kill -9 of a real engine in the middle of a push: the others get their weights, and what it played goes on there."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from penstock.bus.connection import connect
from penstock.config import BusConfig
from penstock.v1 import common_pb2, generate_pb2
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.engine_process import EngineProcess, engine_process
from services.trainer.weight_sync.process_group import WeightProcessGroup
from tests.support.engine.publisher import engine_publisher
from tests.support.engine.reference import Reference, picture, prompt, request, require_logprobs, until_replica
from tests.support.engine.traffic import Traffic
from tests.support.router.routers import Caller, router
from tests.support.waiting import HANG_S
from tests.support.weights.publishing import kept_current, watching

pytestmark = [
    pytest.mark.engine,
    pytest.mark.variant,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
    pytest.mark.leaves_behind("SGLang leaves the files of its sockets in TMPDIR", "file"),
]

RUN = "killed-in-push"
NUM_TURNS = 12


def turn(index: int) -> generate_pb2.GenerateRequest:
    """Long enough to run when the push comes; every other one with a picture."""
    images = [picture(150, 101, seed=index)] if index % 2 else []
    ids = prompt(random.Random(index), num_images=len(images), image_id=366)
    return request(ids, images, max_new_tokens=400)


async def play(caller: Caller, index: int) -> generate_pb2.GenerateResponse:
    """The turn by the router, in a session of its own."""
    made = turn(index)
    fields = {"input_ids": made.input_ids, "images": made.images, "sampling": made.sampling}
    return await caller.generate(f"session-{index}", timeout_s=200.0, **fields)


def killing(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `engine` die when a few parts of the next broadcast are under way; returns the parts that came before."""
    broadcast, sent = WeightProcessGroup.broadcast, []

    def broadcast_and_kill(group: WeightProcessGroup, parts: Iterable[torch.Tensor], *, timeout_s: float) -> None:
        def parts_and_kill() -> Iterable[torch.Tensor]:
            for part in parts:
                if len(sent) == 3:
                    os.killpg(engine.process.pid, signal.SIGKILL)
                sent.append(part.numel())
                yield part

        broadcast(group, parts_and_kill(), timeout_s=timeout_s)

    monkeypatch.setattr(WeightProcessGroup, "broadcast", broadcast_and_kill)
    return sent


async def until_serving(engine: EngineProcess, version: int) -> None:
    """READY at the version."""
    wanted = (version, common_pb2.REPLICA_STATE_READY)
    await until_replica(engine, lambda replica: (replica.policy_version, replica.state) == wanted, timeout_s=60)


async def test_an_engine_is_killed_while_it_receives_weights(
    tiny_model_path: Path, nats_url: str, tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that ran is lost, every token is of the policy that it says; the next engine gets weights and calls."""
    policies = {version: reference.perturbed(version) for version in (1, 2)}
    async with connect(BusConfig(url=nats_url), run=RUN) as bus, contextlib.AsyncExitStack() as stack:

        async def start(name: str) -> EngineProcess:
            folder = tmp_path / name / RUN
            folder.mkdir(parents=True)
            settings = {"max_running": 16, "context_length": 1024, "grace_s": 1.0}
            return await stack.enter_async_context(engine_process(tiny_model_path, nats_url, folder, **settings))

        survivor, victim = await asyncio.gather(start("survivor"), start("victim"))
        watch = await stack.enter_async_context(watching(bus))
        publisher = await stack.enter_async_context(engine_publisher(watch, transport="broadcast"))
        caller = await stack.enter_async_context(router(bus, wait_for_replica_s=60.0))
        await caller.until(lambda pool: sum(each.routable for each in pool.replicas) == 2)
        async with asyncio.timeout(HANG_S):
            while publisher.num_live_replicas < 2:
                await watch.changed(0.2)
        first = await publisher.publish(publisher.take(1, NamedWeights.of(policies[1].weights)))
        assert (first.num_replicas, first.num_failed) == (2, 0)

        traffic = Traffic(lambda index: play(caller, index), 16)
        for engine in (survivor, victim):
            await until_replica(engine, lambda replica: replica.num_running >= 3)
        sent = killing(victim, monkeypatch)
        second = await publisher.publish(publisher.take(2, NamedWeights.of(policies[2].weights)))
        monkeypatch.undo()
        traffic.stop()
        assert (second.num_replicas, second.num_failed) == (1, 1)
        assert len(sent) > 3
        assert await victim.process.wait() == -signal.SIGKILL
        await until_serving(survivor, 2)
        answers = await asyncio.gather(*traffic.calls)
        for index, answer in enumerate(answers):
            assert answer.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
            require_logprobs(policies, turn(index), answer)
        spans = [[span.policy_version for span in answer.version_spans] for answer in answers]
        assert [1, 2] in spans, "no turn ran while weights changed"

        async with kept_current(publisher):
            successor = await start("successor")
            await until_serving(successor, 2)
        await caller.until(lambda pool: sum(each.routable for each in pool.replicas) == 2)
        later = range(len(answers), len(answers) + NUM_TURNS)
        answers = await asyncio.gather(*(play(caller, index) for index in later))
        for index, answer in zip(later, answers, strict=True):
            require_logprobs({2: policies[2]}, turn(index), answer)
        expected = {(await engine.replica()).replica_id for engine in (survivor, successor)}
        assert {answer.replica_id for answer in answers} == expected
