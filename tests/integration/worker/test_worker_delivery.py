"""A prompt becomes a group, whoever is away for a while: once, and with what was said."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from structlog.typing import EventDict

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore, hash_of
from penstock.bus.work_queue.consumer import consuming
from penstock.clients import GenerateClient, RewardClient
from penstock.model.chat.chat_template import Renderer
from penstock.records import Prompt, Sample, TokenSequence, Verdict, VersionSpan
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.answers import SpanningAPush
from penstock.testing.simulated_engine import SimulatedEngine
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.reward import server as reward_server
from services.reward.config import RewardConfig
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.episode_player import EpisodePlayer
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.group_rollout import GroupRollout
from services.rollout.worker.prompt_handler import PromptHandler
from services.rollout.worker.shared_rendering import SharedRendering
from services.router import server as router_server
from services.router.config import RouterConfig
from tests.support.waiting import promptly, until
from tests.support.worker.prompts import (
    ANSWER,
    PICTURE,
    count,
    make_prompt,
    publish,
    read_groups,
    until_done,
    working,
)


async def test_a_prompt_becomes_a_judged_group_through_router_and_reward_service(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str, tiny_model_path: Path
) -> None:
    """Ids, logprobs, versions and pictures arrive as the engine and the data set gave them."""
    port = free_ports(1)[0]
    recipe = make_recipe(f"127.0.0.1:{port}")
    stop_router = asyncio.Event()
    router_recipe = recipe.model_copy(update={"router": RouterConfig(port=port)})
    router = asyncio.create_task(
        router_server.serve(service_settings.for_router(router_recipe), stop_router, security=Security())
    )
    prompt = make_prompt(run_name)
    await publish(bus, prompt)
    async with working(recipe):
        [group] = await until_done(bus, 1)
    stop_router.set()
    await promptly(router)
    assert group.id == prompt.id
    assert (group.error, len(group.samples), group.oldest_version) == ("", 2, 4)
    request = engine.requests[0]
    assert [image.stored.sha256 for image in request.images] == [hash_of(PICTURE)]
    assert {call.session_id for call in engine.requests} == {f"{run_name}/0/0/a/0", f"{run_name}/0/0/a/1"}
    renderer = Renderer.load(tiny_model_path)
    assert isinstance(engine.answer, SpanningAPush)
    num_own = len(engine.answer.ids)
    for sample in group.samples:
        [sequence] = sample.sequences
        assert sequence.token_ids.tolist() == [
            *renderer.render_prompt(prompt.messages, num_images=1),
            *engine.answer.ids,
        ]
        assert sequence.loss_mask.tolist() == [False] * len(request.input_ids) + [True] * num_own
        assert sequence.logprobs[sequence.loss_mask].tolist() == [-0.5] * num_own
        assert sequence.version_spans == (
            VersionSpan(num_tokens=1, policy_version=4),
            VersionSpan(num_tokens=num_own - 1, policy_version=5),
        )
        assert (sample.text, sample.finish_reason, sequence.num_prompt_tokens) == (ANSWER, "stop", 99)
        assert sample.verdict is not None
        assert (sample.reward, sample.verdict.status, sample.verdict.extracted) == (1.0, "OK", "3")


async def test_a_group_published_by_a_worker_that_died_before_its_ack_is_stored_once(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The prompt is delivered and played again, and the bus keeps the first group."""
    recipe = make_recipe(engine.replica.address)
    await publish(bus, make_prompt(run_name))
    async with (
        consuming(bus, bus.prompts, "workers", ack_wait_s=1.0, max_ack_pending=10_000) as consumer,
        GenerateClient(engine.replica.address) as generator,
        RewardClient(recipe.worker.reward_address) as verifier,
    ):
        episodes = EpisodePlayer(
            recipe.worker,
            renderer=Renderer.load(recipe.model.path),
            generator=generator,
            environments=EnvironmentRegistry(),
            answer_verifier=AnswerVerifier(verifier),
        )
        player = GroupRollout(
            episodes=episodes, images=ImageStore(bus), answer_verifier=AnswerVerifier(verifier), worker_id="died"
        )
        [delivery] = await consumer.fetch(1)
        await PromptHandler(bus, player, worker_id="died").handle(delivery)
    assert (await count(bus, bus.groups), await count(bus, bus.prompts)) == (1, 1)
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert group.worker_id == "died"
    assert engine.num_answered == 4


async def test_a_group_says_how_often_its_prompt_was_delivered(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """So the trainer can count what was sampled more than once."""
    recipe = make_recipe(engine.replica.address)
    await publish(bus, make_prompt(run_name))
    async with consuming(bus, bus.prompts, "workers", ack_wait_s=1.0, max_ack_pending=10_000) as consumer:
        [delivery] = await consumer.fetch(1)
        await delivery.put_back()
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert group.num_deliveries > 1


class HeavyPlayer:
    """Plays samples whose recorded experts are this many bytes each."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    async def play(
        self, prompt: Prompt, number: int, images: GroupImages, shared: SharedRendering, closings: Closings
    ) -> "HeavySample":
        return HeavySample(self.size_bytes)


@dataclasses.dataclass(frozen=True)
class HeavySample:
    """What it plays; nothing is left to judge."""

    size_bytes: int
    answer: str = ""
    error: str = ""
    finish_reason: str = "stop"
    needs_verdict: bool = False

    def to_sample(self, verdict: Verdict | None) -> Sample:
        sequence = TokenSequence(
            token_ids=np.array([5, 6], "<i4"),
            loss_mask=np.array([False, True]),
            logprobs=np.array([0, -1], "<f4"),
            version_spans=(VersionSpan(num_tokens=1, policy_version=4),),
            images=(),
            num_prompt_tokens=1,
            num_last_turn_tokens=1,
            routed_experts=np.zeros((1, self.size_bytes // 8, 8), "|u1"),
        )
        return Sample(sequences=(sequence,), reward=1.0, finish_reason="stop", verdict=None, turns=(), text="")


async def test_a_group_is_not_lost_for_the_size_of_its_experts(
    bus: Bus, run_name: str, logged: list[EventDict]
) -> None:
    """It is published without them, and said so, where the server would not take it with them."""
    verifier = RewardClient("127.0.0.1:1")
    async with (
        verifier,
        consuming(bus, bus.prompts, "workers", ack_wait_s=5.0, max_ack_pending=10_000) as consumer,
    ):
        for index, size_bytes in enumerate((1 << 20, 20 << 20)):
            player = GroupRollout(
                episodes=HeavyPlayer(size_bytes),
                images=ImageStore(bus),
                answer_verifier=AnswerVerifier(verifier),
                worker_id="w",
            )
            await publish(bus, make_prompt(run_name, index))
            [delivery] = await consumer.fetch(1)
            await PromptHandler(bus, player, worker_id="w").handle(delivery)
    found = await read_groups(bus)
    assert [group.has_routed_experts for group in found] == [True, False]
    assert [len(group.samples) for group in found] == [2, 2]
    [event] = [event for event in logged if event["event"] == "group.experts_left_out"]
    assert event["size_bytes"] > 40 << 20 > event["size_without_bytes"]
    assert "lower trainer.samples_per_group" in event["remedy"]


def num_logged(events: list[EventDict], name: str) -> int:
    return sum(event["event"] == name for event in events)


async def test_a_router_that_is_down_and_comes_back_loses_nothing(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    logged: list[EventDict],
) -> None:
    """First inside one delivery, then over several deliveries of the prompt. What is logged meanwhile names the
    group."""
    port = free_ports(1)[0]
    recipe = make_recipe(f"127.0.0.1:{port}", grace_s=0.0)
    late = SimulatedEngine(bus, answer=engine.answer, policy_version=4, port=port)
    prompt = make_prompt(run_name)
    await publish(bus, prompt)
    async with working(recipe):
        await until(lambda: num_logged(logged, "turn.retried") > 0)
        async with late.running():
            assert [group.error for group in await until_done(bus, 1)] == [""]
    assert {event["group"] for event in logged if event["event"] == "turn.retried"} == {prompt.id.message}
    await publish(bus, make_prompt(run_name, 1))
    async with working(recipe, wait_timeout_s=1.0):
        await until(lambda: num_logged(logged, "message.put_back") > 0)
    assert await count(bus, bus.groups) == 1
    async with working(recipe), late.running():
        groups = await until_done(bus, 2)
    assert [group.error for group in groups] == ["", ""]
    assert [group.num_deliveries > 1 for group in groups] == [False, True]
    assert await count(bus, bus.dead) == 0


async def test_a_reward_service_that_is_down_and_comes_back_loses_nothing(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    logged: list[EventDict],
) -> None:
    """The played episodes wait for their verdict; they are not played again."""
    port = free_ports(1)[0]
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, reward_address=f"127.0.0.1:{port}")):
        await until(lambda: engine.num_answered == 2 and num_logged(logged, "call.retried") > 0)
        assert await count(bus, bus.groups) == 0
        async with reward_server.running(RewardConfig(port=port, workers=1)):
            [group] = await until_done(bus, 1)
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert engine.num_answered == 2
