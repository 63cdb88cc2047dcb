"""The worker among real neighbours: nats-server, reward service, router, and an engine that says what it is told."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.bus.connection import Bus, Stream
from penstock.bus.consumer import open_consumer
from penstock.clients import GenerateClient, RewardClient
from penstock.codec import decode, encode
from penstock.config import BusConfig, ModelConfig, RunConfig, SamplingConfig
from penstock.errors import ConfigError, InvalidRequestError, UnavailableError
from penstock.records import Group, ImagePart, Message, Prompt, TextPart, VersionSpan
from penstock.v1 import common_pb2, generate_pb2
from services.recipe import Recipe
from services.reward import server as reward_server
from services.reward.config import RewardConfig
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episode import EpisodePlayer
from services.rollout.worker.group import GroupPlayer
from services.rollout.worker.main import Desk, serve
from services.rollout.worker.render import Renderer
from services.router import server as router_server
from services.router.config import RouterConfig
from tests.simulated_engine import SimulatedEngine
from tests.waiting import until

# A palette PNG's beginning, a byte of every value, and \r\n: whatever a file may hold must arrive as it is.
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) + b"PLTE"
ANSWER = "The answer is \\boxed{3}"


class SpeakingEngine(SimulatedEngine):
    """Answers with `answer_ids`, and stops by itself."""

    answer_ids: list[int]

    def _answer(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        ids = self.answer_ids
        return generate_pb2.GenerateResponse(
            output_ids=ids,
            logprobs=[-0.5] * len(ids),
            version_spans=[
                common_pb2.VersionSpan(num_tokens=1, policy_version=self.replica.policy_version),
                common_pb2.VersionSpan(num_tokens=len(ids) - 1, policy_version=self.replica.policy_version + 1),
            ],
            finish_reason=generate_pb2.FINISH_REASON_STOP,
            usage=generate_pb2.Usage(num_prompt_tokens=99, num_cached_tokens=5, num_output_tokens=len(ids)),
            replica_id=self.replica_id,
        )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
async def reward_address() -> AsyncIterator[str]:
    """The real reward service."""
    async with reward_server.running(RewardConfig(workers=1)) as (server, *_):
        yield server.address


@pytest.fixture
async def engine(bus: Bus, tiny_model_path: Path) -> AsyncIterator[SpeakingEngine]:
    """An engine that gives the right answer, as policy version 4 and then 5."""
    engine = SpeakingEngine(bus, policy_version=4)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    engine.answer_ids = tokenizer(ANSWER + "<|im_end|>", add_special_tokens=False).input_ids
    async with engine.running():
        yield engine


@pytest.fixture
def make_recipe(
    bus_config: BusConfig, run_name: str, tiny_model_path: Path, reward_address: str
) -> Callable[..., Recipe]:
    """Recipes of this test's run; `max_deliveries` is the bus's, all else is the worker's."""

    def make(router_address: str, *, max_deliveries: int = 20, **worker: Any) -> Recipe:
        fields = {"router_address": router_address, "reward_address": reward_address, "concurrency": 4} | worker
        return Recipe(
            model=ModelConfig(path=tiny_model_path),
            run=RunConfig(name=run_name),
            bus=bus_config.model_copy(update={"max_deliveries": max_deliveries}),
            sampling=SamplingConfig(max_new_tokens=16),
            worker=WorkerConfig(**fields),
        )

    return make


@contextlib.asynccontextmanager
async def working(recipe: Recipe) -> AsyncIterator[asyncio.Event]:
    """A worker during the context; yields its stop event."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(recipe, stop))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, timeout=15)


def make_prompt(run_name: str, index: int = 0, **changes: Any) -> Prompt:
    """A question with a picture; two samples."""
    fields: dict[str, Any] = {
        "run_id": run_name,
        "index": index,
        "attempt": 0,
        "incarnation": "a",
        "admitted_version": 4,
        "num_samples": 2,
        "messages": (Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x.\r\n"))),),
        "images": (PICTURE,),
        "golds": ("3",),
        "profile": "math",
        "environment": "single_turn",
    }
    return Prompt(**(fields | changes))


async def publish(bus: Bus, prompt: Prompt) -> None:
    """Admit a prompt, as the trainer does."""
    await bus.publish(bus.prompts, encode(prompt), message_id=prompt.message_id)


async def count(bus: Bus, stream: Stream) -> int:
    """Messages that the stream holds."""
    return int((await bus.jetstream.stream_info(stream.name)).state.messages)


async def read(bus: Bus, stream: Stream) -> list[bytes]:
    """All messages of the stream, left where they are."""
    state = (await bus.jetstream.stream_info(stream.name)).state
    messages = [
        await bus.jetstream.get_msg(stream.name, number) for number in range(state.first_seq, state.last_seq + 1)
    ]
    return [message.data or b"" for message in messages]


async def read_groups(bus: Bus) -> list[Group]:
    """All groups that were published."""
    return [decode(data, Group) for data in await read(bus, bus.groups)]


async def until_done(bus: Bus, num_groups: int, timeout_s: float = 30.0) -> list[Group]:
    """Wait until so many groups are published and no prompt is left."""
    async with asyncio.timeout(timeout_s):
        while await count(bus, bus.groups) < num_groups or await count(bus, bus.prompts) > 0:
            await asyncio.sleep(0.05)
    return await read_groups(bus)


async def test_a_prompt_becomes_a_judged_group_through_router_and_reward_service(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str, tiny_model_path: Path
) -> None:
    """Ids, logprobs, versions and pictures arrive as the engine and the data set gave them."""
    port = free_port()
    recipe = make_recipe(f"127.0.0.1:{port}")
    stop_router = asyncio.Event()
    router_recipe = recipe.model_copy(update={"router": RouterConfig(port=port)})
    router = asyncio.create_task(router_server.serve(router_recipe, stop_router))
    prompt = make_prompt(run_name)
    await publish(bus, prompt)
    async with working(recipe):
        [group] = await until_done(bus, 1)
    stop_router.set()
    await asyncio.wait_for(router, timeout=10)
    assert group.prompt == prompt
    assert (group.error, len(group.samples), group.oldest_version) == ("", 2, 4)
    request = engine.requests[0]
    assert [image.data for image in request.images] == [PICTURE]
    assert {call.session_id for call in engine.requests} == {f"{run_name}/0/0/a/0", f"{run_name}/0/0/a/1"}
    renderer = Renderer.load(tiny_model_path)
    num_own = len(engine.answer_ids)
    for sample in group.samples:
        assert sample.token_ids.tolist() == [
            *renderer.render_prompt(prompt.messages, num_images=1),
            *engine.answer_ids,
        ]
        assert sample.loss_mask.tolist() == [False] * len(request.input_ids) + [True] * num_own
        assert sample.logprobs[sample.loss_mask].tolist() == [-0.5] * num_own
        assert sample.version_spans == (
            VersionSpan(num_tokens=1, policy_version=4),
            VersionSpan(num_tokens=num_own - 1, policy_version=5),
        )
        assert (sample.text, sample.finish_reason, sample.num_prompt_tokens) == (ANSWER, "stop", 99)
        assert (sample.verdict.score, sample.verdict.status, sample.verdict.extracted) == (1.0, "OK", "3")


async def test_a_worker_killed_while_playing_loses_nothing(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str, tmp_path: Path
) -> None:
    """kill -9 in the middle: the prompts go to the next worker, and each group is published once."""
    engine.delay_s = 60.0
    recipe = make_recipe(engine.replica.address)
    config = tmp_path / "recipe.json"
    config.write_text(recipe.model_dump_json())
    for index in range(3):
        await publish(bus, make_prompt(run_name, index))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.worker_process", str(config))
    await until(lambda: engine.num_running == 6, timeout_s=60)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: engine.num_running == 0)
    assert await count(bus, bus.groups) == 0
    engine.delay_s = 0.0
    async with working(recipe):
        groups = await until_done(bus, 3)
    assert sorted(group.prompt.index for group in groups) == [0, 1, 2]
    assert await count(bus, bus.dead) == 0


async def test_a_group_published_by_a_worker_that_died_before_its_ack_is_stored_once(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The prompt is delivered and played again, and the bus keeps the first group."""
    recipe = make_recipe(engine.replica.address)
    await publish(bus, make_prompt(run_name))
    consumer = await open_consumer(bus, bus.prompts, "workers", ack_wait_s=1.0, max_ack_pending=10_000)
    async with GenerateClient(engine.replica.address) as generator, RewardClient(recipe.worker.reward_address) as judge:
        episodes = EpisodePlayer(
            recipe.worker,
            recipe.sampling,
            renderer=Renderer.load(recipe.model.path),
            generator=generator,
            environments=EnvironmentRegistry(),
        )
        player = GroupPlayer(recipe.worker, episodes=episodes, judge=judge, worker_id="died")
        [delivery] = await consumer.fetch(1)
        await Desk(bus, player, worker_id="died").handle(delivery)
    assert (await count(bus, bus.groups), await count(bus, bus.prompts)) == (1, 1)
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert group.worker_id == "died"
    assert engine.num_answered == 4


async def test_workers_share_the_queue_and_play_each_prompt_once(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Two workers, twelve prompts, twelve groups."""
    engine.delay_s = 0.1
    recipe = make_recipe(engine.replica.address, concurrency=2)
    for index in range(12):
        await publish(bus, make_prompt(run_name, index))
    async with working(recipe), working(recipe):
        groups = await until_done(bus, 12)
    assert sorted(group.prompt.index for group in groups) == list(range(12))
    assert len({group.worker_id for group in groups}) == 2
    assert engine.num_answered == 24


async def test_a_router_that_is_down_and_comes_back_loses_nothing(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """First inside one try, then over several tries of the prompt."""
    port = free_port()
    recipe = make_recipe(f"127.0.0.1:{port}", episode_timeout_s=1.0)
    await publish(bus, make_prompt(run_name))
    async with working(recipe):
        await asyncio.sleep(2.5)
        assert await count(bus, bus.groups) == 0
        late = SpeakingEngine(bus, policy_version=4, port=port)
        late.answer_ids = engine.answer_ids
        async with late.running():
            [group] = await until_done(bus, 1)
            assert group.error == ""
        await publish(bus, make_prompt(run_name, 1))
        await asyncio.sleep(0.5)
        async with late.running():
            assert [group.error for group in await until_done(bus, 2)] == ["", ""]
    assert await count(bus, bus.dead) == 0


async def test_a_reward_service_that_is_down_and_comes_back_loses_nothing(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The played episodes wait for their verdict; they are not played again."""
    port = free_port()
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, reward_address=f"127.0.0.1:{port}")):
        await until(lambda: engine.num_answered == 2)
        await asyncio.sleep(0.5)
        assert await count(bus, bus.groups) == 0
        async with reward_server.running(RewardConfig(port=port, workers=1)):
            [group] = await until_done(bus, 1)
    assert [sample.verdict.score for sample in group.samples] == [1.0, 1.0]
    assert engine.num_answered == 2


async def test_a_prompt_that_can_never_be_played_is_reported_and_buried_at_once(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The trainer gets the reason as a group, a person gets the prompt as a dead letter, the queue goes on."""
    engine.error = InvalidRequestError("image 0 cannot be read")
    prompt = make_prompt(run_name)
    await publish(bus, prompt)
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
        engine.error = None
        await publish(bus, make_prompt(run_name, 1))
        assert (await until_done(bus, 2))[1].error == ""
    assert group.prompt == prompt
    assert group.samples == ()
    assert "image 0 cannot be read" in group.error
    [letter] = await read(bus, bus.dead)
    reason, _, payload = letter.partition(b"\n")
    assert b"image 0 cannot be read" in reason
    assert decode(payload, Prompt) == prompt


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"golds": ("\\frac{",), "profile": "math"}, "gold answers"),
        ({"profile": "astrology"}, "astrology"),
        ({"environment": "chess"}, "environment 'chess' is unknown"),
    ],
)
async def test_faults_of_the_data_fail_the_group_with_their_reason(
    bus: Bus,
    engine: SpeakingEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    """Judged by the real reward service: never a silent zero."""
    await publish(bus, make_prompt(run_name, **changes))
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
    assert reason in group.error
    assert await count(bus, bus.dead) == 1


async def test_garbage_on_the_queue_is_buried(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """It goes to the dead letters, and on to the trainer, whom its id tells which group will not come."""
    await bus.publish(bus.prompts, b"\xc1 garbage", message_id=f"{run_name}/7/0/a")
    async with working(make_recipe(engine.replica.address)):
        async with asyncio.timeout(30):
            while await count(bus, bus.prompts) > 0:
                await asyncio.sleep(0.05)
    assert await read(bus, bus.groups) == [b"\xc1 garbage"]
    [letter] = await read(bus, bus.dead)
    assert letter.endswith(b"\n\xc1 garbage")


async def test_a_prompt_that_fails_again_and_again_is_given_up(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """After max_deliveries tries, each cut off by episode_timeout_s, the trainer is told."""
    engine.error = UnavailableError("the engine is broken")
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, max_deliveries=2, episode_timeout_s=0.5)):
        [group] = await until_done(bus, 1)
    assert "the engine is broken" in group.error
    assert await count(bus, bus.dead) == 1


async def test_an_episode_that_takes_too_long_is_put_back_and_cancelled(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The engine is not left generating for it; the next try succeeds."""
    engine.delay_s = 60.0
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, episode_timeout_s=1.0)):
        await until(lambda: engine.num_calls == 2)
        await until(lambda: engine.num_running == 0)
        engine.delay_s = 0.0
        [group] = await until_done(bus, 1)
    assert group.error == ""


async def test_a_long_group_is_kept_alive_and_played_once(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Longer than ack_wait_s (1 s here): signs of life keep the prompt from being delivered to another worker."""
    engine.delay_s = 3.0
    recipe = make_recipe(engine.replica.address)
    await publish(bus, make_prompt(run_name))
    async with working(recipe), working(recipe):
        await until_done(bus, 1)
    assert engine.num_calls == 2


async def test_a_worker_that_stops_finishes_what_it_can(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Within the grace period groups in hand are published."""
    engine.delay_s = 1.0
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, grace_s=10.0)) as stop:
        await until(lambda: engine.num_running == 2)
        stop.set()
    assert (await count(bus, bus.groups), await count(bus, bus.prompts)) == (1, 0)


async def test_a_worker_that_stops_puts_back_at_once_what_it_cannot_finish(
    bus: Bus, engine: SpeakingEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The engine's requests are cancelled, and another worker has the prompt without waiting for the ack deadline."""
    engine.delay_s = 60.0
    recipe = make_recipe(engine.replica.address, grace_s=0.2)
    slow_to_expire = recipe.model_copy(update={"bus": recipe.bus.model_copy(update={"ack_wait_s": 60.0})})
    await publish(bus, make_prompt(run_name))
    async with working(slow_to_expire) as stop:
        await until(lambda: engine.num_running == 2)
        started = time.monotonic()
        stop.set()
    assert time.monotonic() - started < 5
    await until(lambda: engine.num_cancelled == 2)
    engine.delay_s = 0.0
    async with working(slow_to_expire):
        await until_done(bus, 1, timeout_s=10)


async def test_a_worker_without_addresses_says_which_setting_is_missing(make_recipe: Callable[..., Recipe]) -> None:
    """Ports are 0 in a recipe that no launcher has resolved."""
    with pytest.raises(ConfigError, match=r"worker\.router_address is empty and router\.port is 0"):
        await serve(make_recipe(""), asyncio.Event())
    with pytest.raises(ConfigError, match=r"worker\.reward_address is empty and reward\.port is 0"):
        await serve(make_recipe("127.0.0.1:1", reward_address=""), asyncio.Event())
