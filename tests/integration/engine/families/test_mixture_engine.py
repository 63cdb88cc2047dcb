"""Mixtures of experts on real SGLang: what it loads, and what a push makes of it, is the trainer's model; and the
trainer replays its routing."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.bus.image_store import hash_of
from penstock.clients.resumable import ResumableTurn
from penstock.model.tokens import forbidden_token_ids
from penstock.records import Group, GroupId, Sample
from penstock.v1 import generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from services.rollout.worker.episodes.trajectory import Trajectory
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.batching.packing import Block
from services.trainer.batching.rows import build_row
from services.trainer.batching.sequences import TrainSequence, open_reader
from tests.support.engine.family import FELT, MOST, PICTURES, difference, engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, picture, prompt, request
from tests.support.engine.traffic import Traffic
from tests.support.trainer.families import EXPERTS, MIXTURES, heard, write_model
from tests.support.trainer.routing import chosen_experts, disturb_routers, exchanged

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
]


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_vl_moe", 1),
        ("qwen3_moe", 2),
        pytest.param(("qwen3_vl_moe", 2), marks=pytest.mark.variant),
        pytest.param(("qwen3_moe", 1), marks=pytest.mark.variant),
    ],
    ids=lambda param: f"{param[0]}, {param[1]} processes",
)
def family(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A family of mixtures, and the number of its engine's processes."""
    found: tuple[str, int] = request.param
    return found


@pytest.fixture(scope="module")
def mixture(family: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    model = heard(MIXTURES[family[0]](), std_of_embedding=0.1)
    return write_model(model, tmp_path_factory.mktemp("mixture") / family[0])


@pytest.fixture(scope="module")
async def mixture_engine(
    family: tuple[str, int], mixture: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """Its engine, which records the experts of every token. Two processes divide them as wholes."""
    folder = tmp_path_factory.mktemp("mixture-engine")
    sizes = {"tensor_parallel": family[1], "expert_parallel": family[1]}
    async with engine_of(mixture, nats_url, folder, router_replay=True, **sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def policy(mixture: Path) -> Reference:
    """The same in transformers."""
    return Reference(mixture)


async def test_a_mixture_is_the_trainers_model_before_and_after_pushes(
    mixture_engine: EngineProcess, policy: Reference
) -> None:
    """Exchanged experts would be noticed."""
    version = await restore(mixture_engine, policy)
    newer = await require_same_through_pushes(mixture_engine, policy, version=version)
    exchanged = {
        name: weight.flip(0) if name.endswith("experts.down_proj") else weight for name, weight in newer.weights.items()
    }
    await Push(mixture_engine, exchanged, version + 3).complete()
    assert await difference(mixture_engine, newer) > FELT


async def restore(engine: EngineProcess, policy: Reference) -> int:
    """Give the engine the weights that it began with, if another test has pushed; return its version."""
    version = (await engine.replica()).policy_version
    if version:
        version += 1
        await Push(engine, policy.weights, version).complete()
    return version


async def said(engine: EngineProcess, trajectory: Trajectory, images: Sequence[bytes], *, breaks_off: bool) -> None:
    """Add a turn of the engine, as a stream; a stream that breaks off is continued with the tokens that came."""
    asked = request(trajectory.token_ids, images, max_new_tokens=40)
    asked.sampling.ignore_end = True
    asked.chunk_tokens = 8
    asked.routed_experts_from = trajectory.num_routed_tokens
    turn = ResumableTurn(asked)
    while not turn.is_finished:
        stream = engine.generation.GenerateStream(turn.remaining(), timeout=60)
        async for chunk in stream:
            turn.add(chunk)
            if breaks_off and turn.num_tokens > 10:
                stream.cancel()
                breaks_off = False
                break
    trajectory.add_turn(turn.response())


def sample_of(trajectory: Trajectory) -> Sample:
    """The finished sample."""
    turns, sequences = trajectory.turns, trajectory.to_sequences()
    return Sample(sequences=sequences, reward=0.0, finish_reason="stop", verdict=None, turns=turns, text="")


async def played(engine: EngineProcess, model: Path, image_id: int | None) -> list[TrainSequence]:
    """Samples of two turns as the trainer reads them: texts and pictures, from prefix caches, in several attempts."""
    samples, shown = [], {}
    for seed in range(6):
        rng = random.Random(seed // 2)  # two of each prompt
        images = [picture(*PICTURES[0], seed=seed // 2)] if image_id is not None and seed // 2 else []
        shown |= {hash_of(image): image for image in images}
        trajectory = Trajectory(min_version=0)
        trajectory.add_observation(prompt(rng, num_images=len(images), image_id=image_id), [*map(hash_of, images)])
        await said(engine, trajectory, images, breaks_off=seed % 2 == 1)
        trajectory.add_observation([rng.randrange(300) for _ in range(7)])
        await said(engine, trajectory, images, breaks_off=False)
        samples.append(sample_of(trajectory))
        assert trajectory.turns[1].num_cached_tokens > 0
    return read(samples, shown, model)


def read(samples: Sequence[Sample], images: Mapping[str, bytes], model: Path) -> list[TrainSequence]:
    """The sequences of a group's samples, as the trainer reads them."""
    group_id = GroupId(run_id="r", index=0, attempt=0, trainer_epoch="a")
    group = Group(id=group_id, num_samples=len(samples), samples=tuple(samples), worker_id="w")
    return [*open_reader(model).read(group, images).sequences]


async def test_the_trainer_takes_the_experts_that_the_engine_chose(
    mixture_engine: EngineProcess, policy: Reference, mixture: Path
) -> None:
    """Of all tokens it computed. Equal routers choose the same; others jump without the replay, and not with it."""
    await restore(mixture_engine, policy)
    sequences = await played(mixture_engine, mixture, policy.image_id)
    assert [each.num_routed for each in sequences] == [each.num_inputs for each in sequences]
    trainer = load_policy(mixture, temperature=1.0, forbidden_ids=forbidden_token_ids(mixture))

    @torch.no_grad()
    def dlogp(samples: Sequence[TrainSequence], *, replayed: bool) -> float:
        plan = [Block(sequences=(number,), prefix_length=0) for number in range(len(samples))]
        row = build_row(samples, plan, with_experts=replayed)
        return float((trainer(row).logprobs_N - row.engine_logprobs_N).abs().max())

    plan = [Block(sequences=(number,), prefix_length=0) for number in range(len(sequences))]
    own = chosen_experts(trainer, build_row(sequences, plan))
    engines = np.concatenate([each.routed_experts_RLK[: each.num_inputs] for each in sequences])
    assert (np.sort(own) == np.sort(engines)).mean() > 0.999
    off, on = (dlogp(sequences, replayed=replayed) for replayed in (False, True))
    assert on <= max(off, MOST)
    assert on <= MOST
    assert dlogp(exchanged(sequences, EXPERTS["num_experts"]), replayed=True) > FELT
    disturb_routers(trainer, 0.02)
    off, on = (dlogp(sequences, replayed=replayed) for replayed in (False, True))
    assert off > FELT / 10
    assert on < off / 4, (on, off)


async def test_a_turn_that_spans_a_push_has_the_experts_of_the_weights_that_ended_it(
    mixture_engine: EngineProcess, policy: Reference, mixture: Path
) -> None:
    """Its first tokens were computed again; so the trainer, which has these weights, computes what the engine did."""
    version = await restore(mixture_engine, policy) + 1
    newer = policy.perturbed(seed=9)
    push = Push(mixture_engine, newer.weights, version)
    await push.prepare()
    trajectory = Trajectory(min_version=0)
    trajectory.add_observation(prompt(random.Random(7), num_images=0, image_id=None))

    async def play(number: int) -> generate_pb2.GenerateResponse:
        asked = request(trajectory.token_ids, max_new_tokens=100 * (1 + number % 4))
        asked.sampling.ignore_end = True
        asked.routed_experts_from = 0
        return await mixture_engine.generation.Generate(asked, timeout=60)

    traffic = Traffic(play, 4)
    await traffic.under_way()  # of four lengths, so that not all end at once
    await push.pause()
    traffic.stop()
    await push.deliver()
    turns = await asyncio.gather(*traffic.calls)
    trajectory.add_turn(next(turn for turn in turns if len(turn.version_spans) == 2))
    [sequence] = read([sample_of(trajectory)], {}, mixture)
    is_new = sequence.versions_X == version
    assert sequence.num_own_tokens > is_new.sum() > 0
    trainer = load_policy(mixture, temperature=1.0, forbidden_ids=forbidden_token_ids(mixture))
    trainer.model.load_state_dict(newer.model.state_dict())
    row = build_row([sequence], [Block(sequences=(0,), prefix_length=0)], with_experts=True)
    assert sequence.routed_experts_RLK is not None
    assert sequence.num_routed == sequence.num_inputs
    own = chosen_experts(trainer, build_row([sequence], [Block(sequences=(0,), prefix_length=0)]))
    assert (np.sort(own) == np.sort(sequence.routed_experts_RLK)).mean() > 0.999
    with torch.no_grad():
        dlogp = (trainer(row).logprobs_N - row.engine_logprobs_N).abs()
    assert dlogp[row.versions_N == version].max() <= MOST
    assert dlogp[row.versions_N != version].max() > FELT
