"""Mixtures of experts on real SGLang: what it loads, and what a push makes of it, is the trainer's model; and the
trainer replays its routing."""

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.bus.image_store import hash_of
from penstock.clients.resumable import ResumableTurn
from penstock.model.tokens import forbidden_token_ids
from penstock.records import Group, GroupId, Sample
from penstock.testing.engine_process import EngineProcess
from services.rollout.worker.episodes.trajectory import Trajectory
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.batching.packing import Block
from services.trainer.batching.rows import build_row
from services.trainer.batching.sequences import TrainSequence, open_reader
from tests.support.engine.family import FELT, MOST, PICTURES, difference, engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, picture, prompt, request
from tests.support.trainer.families import EXPERTS, MIXTURES, heard, write_model
from tests.support.trainer.routing import chosen_experts, disturb_routers, exchanged

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    model = heard(MIXTURES[request.param](), std_of_embedding=0.1)
    return write_model(model, tmp_path_factory.mktemp("mixture") / request.param)


@pytest.fixture(scope="module")
async def mixture_engine(
    mixture: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """Its engine, which records the experts of every token."""
    folder = tmp_path_factory.mktemp("mixture-engine")
    async with engine_of(mixture, nats_url, folder, router_replay=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def policy(mixture: Path) -> Reference:
    """The same in transformers."""
    return Reference(mixture)


async def test_a_mixture_is_the_trainers_model_before_and_after_pushes(
    mixture_engine: EngineProcess, policy: Reference
) -> None:
    """Exchanged experts would be noticed."""
    newer = await require_same_through_pushes(mixture_engine, policy)
    exchanged = {
        name: weight.flip(0) if name.endswith("experts.down_proj") else weight for name, weight in newer.weights.items()
    }
    await Push(mixture_engine, exchanged, 3).complete()
    assert await difference(mixture_engine, newer) > FELT


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
        sequences = trajectory.to_sequences()
        samples.append(
            Sample(sequences=sequences, reward=0.0, finish_reason="stop", verdict=None, turns=trajectory.turns, text="")
        )
        assert trajectory.turns[1].num_cached_tokens > 0
    group_id = GroupId(run_id="r", index=0, attempt=0, trainer_epoch="a")
    group = Group(id=group_id, num_samples=len(samples), samples=tuple(samples), worker_id="w")
    return [*open_reader(model).read(group, shown).sequences]


async def test_the_trainer_takes_the_experts_that_the_engine_chose(
    mixture_engine: EngineProcess, policy: Reference, mixture: Path
) -> None:
    """Of all tokens it computed. Equal routers choose the same; others jump without the replay, and not with it."""
    if version := (await mixture_engine.replica()).policy_version:  # another test has pushed
        await Push(mixture_engine, policy.weights, version + 1).complete()
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
