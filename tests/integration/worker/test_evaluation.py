"""An evaluation over the queues, a real worker and the real reward service."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.errors import DataError
from penstock.records import Group, Prompt
from penstock.records.codec import decode, encode
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.answers import Saying
from penstock.testing.simulated_engine import SimulatedEngine
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.router import server as router_server
from services.router.config import RouterConfig
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.bus_player import play_on_bus
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.evaluation import Evaluation
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.evaluated import log_of_evaluation
from services.view.run_reader import RunReader
from tests.support.trainer.data.pictures import png
from tests.support.trainer.outcomes import appending_to
from tests.support.waiting import promptly, until
from tests.support.worker.prompts import ANSWER, count, read, working


@pytest.fixture
async def engine(bus: Bus, tiny_model_path: Path) -> AsyncIterator[SimulatedEngine]:
    """An engine that answers 3 to everything, as version 0."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    ids = tokenizer(ANSWER + "<|im_end|>", add_special_tokens=False).input_ids
    async with SimulatedEngine(bus, answer=Saying(ids), policy_version=0).running() as engine:
        yield engine


@pytest.fixture
async def recipe(make_recipe: Callable[..., Recipe]) -> AsyncIterator[Recipe]:
    """A recipe whose router runs."""
    port, stop = free_ports(1)[0], asyncio.Event()
    recipe = make_recipe(f"127.0.0.1:{port}").model_copy(update={"router": RouterConfig(port=port)})
    router = asyncio.create_task(router_server.serve(service_settings.for_router(recipe), stop, security=Security()))
    yield recipe
    stop.set()
    await promptly(router)


def make_sets(folder: Path, answers: list[str], *, name: str = "s", **settings: object) -> dict[str, EvaluationSet]:
    """A set of pictures, one for each gold answer."""
    file = folder / f"{name}.jsonl"
    rows = [
        {
            "images": [base64.b64encode(png(("red", "blue")[number % 2])).decode()],
            "problem": "<image>Find x.",
            "answer": answer,
        }
        for number, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvaluationSetConfig.model_validate(
        {"path": str(file), "profile": "math", "max_new_tokens": 16, **settings}
    )
    return open_sets(EvaluationConfig(sets={name: config}), DataConfig())


async def test_every_row_has_one_outcome(bus: Bus, engine: SimulatedEngine, recipe: Recipe, tmp_path: Path) -> None:
    """With the scores of its own gold answer, of the version that was asked for; its images are removed afterwards."""
    sets = make_sets(tmp_path, ["3", "4", "3.0"], samples_per_prompt=2, temperature=0)
    sets |= make_sets(tmp_path, ["5"], name="other")
    played: list[PlayedPrompt] = []
    async with working(recipe):
        await promptly(play_on_bus(sets, bus, version=0, on_played=appending_to(played)))
        await until(lambda: _is_empty(bus))
    by_row = {(each.set_name, each.row): each for each in played}
    assert len(by_row) == len(played) == 4
    scores = {key: [sample.score for sample in each.samples] for key, each in by_row.items()}
    assert scores == {("s", 0): [1, 1], ("s", 1): [0, 0], ("s", 2): [1, 1], ("other", 0): [0]}
    first = by_row["s", 0]
    assert (first.versions, first.golds, first.error) == ((0, 0), ("3",), "")
    assert first.messages == [{"role": "user", "content": "<image>Find x."}]
    assert (first.samples[0].text, first.samples[0].extracted, first.samples[0].finish_reason) == (ANSWER, "3", "stop")
    assert {request.sampling.temperature for request in engine.requests} == {0.0, 1.0}


async def test_answers_are_kept_to_be_read_token_by_token(
    bus: Bus, engine: SimulatedEngine, recipe: Recipe, tmp_path: Path, tiny_model_path: Path
) -> None:
    """By a run's setting; `penstock view` finds them in the evaluation's folder, with the rows' pictures."""
    sets = make_sets(tmp_path, ["3", "4"], samples_per_prompt=2)
    async with (
        working(recipe),
        log_of_evaluation(tmp_path, EpisodesConfig(keep="all"), tiny_model_path, version=0) as episodes,
    ):
        await promptly(play_on_bus(sets, bus, version=0, on_played=appending_to([]), episodes=episodes))
    reader = RunReader(tmp_path)
    entries = sorted(reader.episodes(), key=lambda entry: int(entry["row"]))
    about = [(each["outcome"], each["source"], each["row"], each["step"], each["version"]) for each in entries]
    assert about == [("evaluated", "eval/s", row, 0, 0) for row in (0, 1)]
    assert [each["rewards"] for each in entries] == [[1.0, 1.0], [0.0, 0.0]]
    group = json.loads(reader.episode(entries[0]["number"]))
    assert "".join(group["samples"][0]["sequences"][0]["texts"]) == f"{ANSWER}<|im_end|>"
    assert reader.image(group["images"][0]) == png("red")


async def test_a_resumed_evaluation_keeps_each_row_once(
    bus: Bus, engine: SimulatedEngine, recipe: Recipe, tmp_path: Path, tiny_model_path: Path
) -> None:
    """Of a row that is played again, the group that counts, under a new number; all groups have identities of their
    own, by which the timeline finds the group of a span."""
    sets = make_sets(tmp_path, ["3", "4", "3"])
    config, found = EpisodesConfig(keep="all"), []
    async with working(recipe):
        for played in (frozenset[tuple[str, int]](), frozenset({("s", 1)})):
            async with log_of_evaluation(tmp_path, config, tiny_model_path, version=0, played=played) as episodes:
                playing = play_on_bus(
                    sets, bus, version=0, on_played=appending_to([]), played=played, episodes=episodes
                )
                await promptly(playing)
            found.append(RunReader(tmp_path).episodes())
    first, entries = found
    assert sorted(each["row"] for each in entries) == [0, 1, 2]
    assert len({(each["group"], each["attempt"]) for each in entries}) == 3
    assert [each for each in first if each["row"] == 1] == entries[:1]
    assert [each["number"] for each in entries[1:]] == [3, 4]


async def test_what_cannot_be_judged_fails_alone(
    bus: Bus, engine: SimulatedEngine, recipe: Recipe, tmp_path: Path
) -> None:
    """A gold answer that the profile cannot read fails its own prompt, with the reason; the others are played."""
    played: list[PlayedPrompt] = []
    async with working(recipe):
        sets = make_sets(tmp_path, ["3", "x" * 600, "3"])
        await promptly(play_on_bus(sets, bus, version=0, on_played=appending_to(played)))
    errors = {each.row: each.error for each in played}
    assert {row: bool(error) for row, error in errors.items()} == {0: False, 1: True, 2: False}
    assert "cannot be read by reward profile 'math'" in errors[1]


async def test_a_set_that_cannot_be_played_ends_the_evaluation(
    bus: Bus, engine: SimulatedEngine, recipe: Recipe, tmp_path: Path
) -> None:
    """A profile that does not exist would fail every prompt: the first few say so."""
    sets = make_sets(tmp_path, ["3"] * 40, profile="no-such")
    played: list[PlayedPrompt] = []
    async with working(recipe):
        with pytest.raises(ExceptionGroup) as raised:
            await promptly(play_on_bus(sets, bus, version=0, on_played=appending_to(played)))
    [error] = raised.value.exceptions
    assert isinstance(error, DataError)
    assert "the first 8 prompts of evaluation.sets.s all failed" in str(error)
    assert "no-such" in str(error)


@contextlib.asynccontextmanager
async def published(
    bus: Bus, sets: dict[str, EvaluationSet], played: list[PlayedPrompt], **changes: Any
) -> AsyncIterator[Evaluation]:
    """An evaluation of version 7 that runs without workers, and is over at the end of the context."""
    images = ImageStore(bus)
    await images.ensure()

    async def has_received_all() -> bool:
        return True

    evaluation = Evaluation(
        sets,
        bus=bus,
        images=images,
        run_id="e",
        epoch="a",
        version=7,
        on_played=appending_to(played),
        **{"has_received_all": has_received_all, **changes},
    )
    running = asyncio.create_task(evaluation.run())
    await until(lambda: _has_prompts(bus, 1))
    yield evaluation
    await promptly(running)


async def prompts(bus: Bus) -> list[Prompt]:
    """What the queue holds."""
    return [decode(each, Prompt) for each in await read(bus, bus.prompts)]


def broken(prompt: Prompt, **changes: Any) -> Group:
    """Its group, without samples."""
    fields = {"samples": (), "worker_id": "w", "error": "broken", **changes}
    return Group(id=prompt.id, purpose=prompt.purpose, num_samples=1, **fields)


async def test_a_lost_group_is_published_again_and_a_copy_is_ignored(bus: Bus, tmp_path: Path) -> None:
    """Whatever comes twice, a row has one outcome; no image is left."""
    played: list[PlayedPrompt] = []
    async with published(bus, make_sets(tmp_path, ["3"]), played) as evaluation:
        [prompt] = await prompts(bus)
        assert (prompt.exact_version, prompt.purpose, prompt.id.attempt) == (7, "s", 0)
        await evaluation.receive(broken(prompt, error="gone", is_lost=True))
        [_, again] = await prompts(bus)
        assert again.id.attempt == 1
        await evaluation.receive(broken(again))
        await evaluation.receive(broken(again))
    assert [(each.row, each.error) for each in played] == [(0, "broken")]
    assert await count(bus, bus.images) == 0


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside training"])
async def test_a_prompt_that_the_server_lost_is_published_again(bus: Bus, tmp_path: Path, beside: bool) -> None:
    """Once nothing arrives any more and neither queue holds it; not while a group may still be on its way. Prompts that
    training keeps in the queue do not hide the loss, even under the lost one's number."""
    played: list[PlayedPrompt] = []
    has_all, num_looks = False, 0

    async def has_received_all() -> bool:
        nonlocal num_looks
        num_looks += 1
        return has_all

    sets = make_sets(tmp_path, ["3"])
    async with published(bus, sets, played, has_received_all=has_received_all, silence_s=0.05) as evaluation:
        [prompt] = await prompts(bus)
        await bus.jetstream.delete_stream(bus.prompts.name)
        await bus.ensure_streams()
        if beside:
            foreign = msgspec.structs.replace(prompt, id=msgspec.structs.replace(prompt.id, run_id="training"))
            await bus.publish(bus.prompts, encode(foreign), message_id=foreign.id.message)
        await until(lambda: num_looks >= 3)
        assert await count(bus, bus.prompts) == int(beside)
        has_all = True
        await until(lambda: _has_prompts(bus, 1 + int(beside)))
        [again] = [each for each in await prompts(bus) if each.id.run_id == prompt.id.run_id]
        assert (again.id.index, again.id.attempt) == (prompt.id.index, 1)
        await evaluation.receive(broken(again))
    assert [each.error for each in played] == ["broken"]


async def _is_empty(bus: Bus) -> bool:
    return not any([await count(bus, stream) for stream in (bus.prompts, bus.groups, bus.images)])


async def _has_prompts(bus: Bus, number: int) -> bool:
    return await count(bus, bus.prompts) >= number
