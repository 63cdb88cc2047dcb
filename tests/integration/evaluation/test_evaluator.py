"""Evaluations of a run over the bus, and what a crash leaves of one."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.model.chat.chat_template import Renderer
from penstock.records import Group, Prompt
from penstock.records.codec import decode
from penstock.runtime.process import end_task
from penstock.telemetry.json_lines import append_lines
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.simulated_replica import weights_of
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.evaluator import Evaluator
from services.trainer.evaluation.holding import Interrupted, folder_of
from services.trainer.evaluation.report import EVALUATIONS_FILE
from services.trainer.evaluation.sets import open_sets
from services.trainer.position import Position
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.log import EpisodeLog
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.trainer.groups import make_group, num_placeholders, picture
from tests.support.waiting import HANG_S, promptly, settled, until

NUM_PROMPTS = 3
MANY_SLOTS = 64


async def is_complete() -> bool:
    """Every group has been received."""
    return True


async def open_evaluator(
    bus: Bus,
    folder: Path,
    *,
    epoch: str,
    logged: list[dict[str, Any]],
    num_samples: int = 2,
    holding: Any = None,
    episodes: Any = None,
) -> Evaluator:
    """Of a run at step 4, which is evaluated every 2 steps on three pictures."""
    config = EvaluationConfig(
        every=2, sets={"s": EvaluationSetConfig(num_prompts=NUM_PROMPTS, samples_per_prompt=num_samples)}
    )
    images = ImageStore(bus)
    await images.ensure()
    trackers: Any = SimpleNamespace(log=logged.append)
    evaluator = Evaluator(
        config,
        open_sets(config, DataConfig()),
        bus=bus,
        images=images,
        trackers=trackers,
        folder=folder,
        run_id="run",
        epoch=epoch,
        step=4,
        num_steps=10,
        holding=holding,
        episodes=episodes,
    )
    await evaluator.open()
    return evaluator


async def take_prompts(bus: Bus) -> list[Prompt]:
    """All prompts of an evaluation, in the order of their rows; the queue is empty afterwards."""

    async def are_there() -> bool:
        return (await bus.jetstream.stream_info(bus.prompts.name)).state.messages == NUM_PROMPTS

    await until(are_there)
    state = (await bus.jetstream.stream_info(bus.prompts.name)).state
    numbers = range(state.first_seq, state.last_seq + 1)
    messages = [await bus.jetstream.get_msg(bus.prompts.name, number) for number in numbers]
    await bus.purge(bus.prompts)
    return sorted((decode(each.data or b"", Prompt) for each in messages), key=lambda each: each.id.index)


def played(prompt: Prompt, model: Path, *, rewards: Sequence[float] = (1.0, 0.0), **shown: Any) -> Group:
    """The prompt's group, of which the first sample is right."""
    assert prompt.exact_version is not None
    group = make_group(model, index=0, version=prompt.exact_version, rewards=list(rewards), **shown)
    return msgspec.structs.replace(group, id=prompt.id, purpose=prompt.purpose)


async def test_an_evaluation_is_one_line(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """With step, version and the sets' numbers; trackers get them too, and the step is not due again."""
    logged: list[dict[str, Any]] = []
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=logged)
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    for prompt in await take_prompts(bus):
        assert (prompt.exact_version, prompt.purpose, prompt.num_samples) == (7, "s", 2)
        await evaluator.receive(played(prompt, tiny_model_path))
    await promptly(evaluating)
    [row] = map(json.loads, (tmp_path / EVALUATIONS_FILE).read_text().splitlines())
    assert (row["step"], row["policy_version"], row["sets"]["s"]["score"]["value"]) == (4, 7, 0.5)
    lines = (tmp_path / "evaluations/step-000004/samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["row"] for line in lines) == [0, 1, 2]
    assert {tuple(json.loads(line)["versions"]) for line in lines} == {(7, 7)}
    [values] = logged
    assert (values["step"], values["eval/s/score"], values["eval/s/pass_at_2"]) == (4, 0.5, 1.0)
    assert not evaluator.is_due(4)


async def test_answers_are_kept_to_be_read_token_by_token(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """With the pictures that the environment showed, which the bus forgets as soon as the row has its outcome."""
    config, position = EpisodesConfig(keep="all"), Position(num_steps=10, step=4, version=7)
    names = Renderer.load(tiny_model_path).token_texts().names_of
    no_rows: Any = None  # the set has the rows
    episodes = EpisodeLog(tmp_path, config, position, dataset=no_rows, names=names)
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=[], episodes=episodes)
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    shown = picture(3)
    first, second, third = await take_prompts(bus)
    sha256 = await ImageStore(bus).put(first.id.scope, shown)
    samples: dict[str, Any] = {"images": [shown], "placeholders": [num_placeholders((96, 96))]}
    await evaluator.receive(played(first, tiny_model_path, **samples))
    await evaluator.receive(played(second, tiny_model_path, **samples))  # its picture is not on the bus any more
    failed = msgspec.structs.replace(played(third, tiny_model_path), samples=(), error="no environment")
    await evaluator.receive(failed)
    await promptly(evaluating)
    await asyncio.to_thread(episodes.close)
    entries = [json.loads(line) for line in (tmp_path / "episodes/index.jsonl").read_text().splitlines()]
    assert [(each["outcome"], each["source"], each["row"], each["step"], each["version"]) for each in entries] == [
        ("evaluated", "eval/s", row, 4, 7) for row in range(3)
    ]
    assert [each["error"] for each in entries] == ["", "", "no environment"]
    assert (tmp_path / "episodes" / "images" / f"{sha256}.png").read_bytes() == shown
    line = (tmp_path / "episodes" / entries[0]["file"]).read_bytes().splitlines()[0]
    assert json.loads(line)["samples"][0]["sequences"][0]["images"] == [f"{sha256}.png"]


async def test_rows_that_are_given_up_are_kept_with_the_reason(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """Those whose group cannot be decoded, and those that another version has played."""
    names = Renderer.load(tiny_model_path).token_texts().names_of
    no_rows: Any = None  # the set has the rows
    position = Position(num_steps=10, step=4, version=7)
    episodes = EpisodeLog(tmp_path, EpisodesConfig(keep="all"), position, dataset=no_rows, names=names)
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=[], episodes=episodes)
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    first, second, third = await take_prompts(bus)
    assert await evaluator.fail(first.id, "it is cut off")
    old = msgspec.structs.replace(make_group(tiny_model_path, index=0, version=6), id=second.id, purpose="s")
    await evaluator.receive(old)
    await evaluator.receive(played(third, tiny_model_path))
    await promptly(evaluating)
    await asyncio.to_thread(episodes.close)
    entries = [json.loads(line) for line in (tmp_path / "episodes/index.jsonl").read_text().splitlines()]
    assert [(each["row"], each["error"]) for each in entries] == [
        (0, "it is cut off"),
        (1, "it has tokens of policy versions 6 to 6, not only 7"),
        (2, ""),
    ]


@pytest.mark.parametrize("writing", ["write_page", "append_lines"])
async def test_an_evaluation_is_not_due_while_its_answers_are_written_down(
    bus: Bus, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, writing: str
) -> None:
    """All is played and nothing is reported yet: a loop that asks in this moment must not take it for a stopped one,
    and a disk that hangs does not keep it from asking."""
    is_writing, may_write = threading.Event(), threading.Event()

    def write_slowly(*_: object, **__: object) -> None:
        is_writing.set()
        assert may_write.wait(HANG_S)

    monkeypatch.setattr(f"services.trainer.evaluation.evaluator.{writing}", write_slowly)
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=[])
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    for prompt in await take_prompts(bus):
        await evaluator.receive(played(prompt, tiny_model_path))
    await until(is_writing.is_set)
    assert not evaluator.is_due(4)
    may_write.set()
    await promptly(evaluating)
    assert not evaluator.is_due(4)


async def test_a_disk_that_hangs_holds_up_an_answer_and_not_the_loop(
    bus: Bus, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on in the same loop. A stop waits for the answer, which is then in the file."""
    is_writing, may_write = threading.Event(), threading.Event()

    def write_slowly(*arguments: Any) -> int:
        is_writing.set()
        assert may_write.wait(HANG_S)
        return append_lines(*arguments)

    monkeypatch.setattr("services.trainer.evaluation.report.append_lines", write_slowly)
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=[])
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    first, *_ = await take_prompts(bus)
    receiving = asyncio.create_task(evaluator.receive(played(first, tiny_model_path)))
    await until(is_writing.is_set)
    receiving.cancel()
    await settled()
    assert not receiving.done()
    may_write.set()
    await asyncio.wait((receiving,))
    assert receiving.cancelled()
    [line] = (tmp_path / "evaluations/step-000004/samples.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == 0
    await end_task(evaluating)


async def test_a_stop_while_an_evaluation_is_reported_loses_nothing_of_it(
    bus: Bus, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed trainer finds the line and does not evaluate again, so trackers must have been told, too."""
    is_writing, may_write = threading.Event(), threading.Event()

    def write_slowly(*arguments: Any, **options: Any) -> int:
        is_writing.set()
        assert may_write.wait(HANG_S)
        return append_lines(*arguments, **options)

    monkeypatch.setattr("services.trainer.evaluation.evaluator.append_lines", write_slowly)
    logged: list[dict[str, Any]] = []
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=logged)
    evaluating = asyncio.create_task(evaluator.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    for prompt in await take_prompts(bus):
        await evaluator.receive(played(prompt, tiny_model_path))
    await until(is_writing.is_set)
    evaluating.cancel()
    asyncio.get_running_loop().call_later(0.01, may_write.set)
    await asyncio.wait((evaluating,))
    assert evaluating.cancelled()
    assert not evaluator.is_due(4)
    assert [row["step"] for row in logged] == [4]
    [row] = map(json.loads, (tmp_path / EVALUATIONS_FILE).read_text().splitlines())
    assert row["step"] == 4


async def test_an_evaluation_that_a_crash_ends_is_played_anew(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """Under the version that the resumed trainer announces; nothing that was played before it counts."""
    logged: list[dict[str, Any]] = []
    dying = await open_evaluator(bus, tmp_path, epoch="a", logged=logged)
    evaluating = asyncio.create_task(dying.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    first, second, _ = await take_prompts(bus)
    await dying.receive(played(first, tiny_model_path))
    await end_task(evaluating)
    resumed = await open_evaluator(bus, tmp_path, epoch="b", logged=logged)
    assert resumed.is_due(4)
    evaluating = asyncio.create_task(resumed.evaluate(4, 9, has_received_all=is_complete, on_held_out=None))
    prompts = await take_prompts(bus)
    await resumed.receive(played(second, tiny_model_path))  # it was in play when the trainer died
    for prompt in prompts:
        await resumed.receive(played(prompt, tiny_model_path))
    await promptly(evaluating)
    [row] = map(json.loads, (tmp_path / EVALUATIONS_FILE).read_text().splitlines())
    assert (row["policy_version"], row["sets"]["s"]["num_prompts"]) == (9, NUM_PROMPTS)
    lines = (tmp_path / "evaluations/step-000004/samples.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line)["versions"]) for line in lines] == [(9, 9)] * NUM_PROMPTS


class Holding:
    """Has one replica to hold out."""

    async def go_on(self, _: Interrupted) -> Any:
        """It is held out at once."""

        async def until_some() -> None:
            return

        return SimpleNamespace(until_some=until_some, num_slots=MANY_SLOTS, replica_ids={"a"})

    async def end(self, step: int) -> None:
        """Release nothing."""


async def test_an_evaluation_that_goes_on_plays_a_changed_set_anew(
    bus: Bus, tmp_path: Path, tiny_model_path: Path
) -> None:
    """Answers to other settings are no answers of the set; with other numbers of samples they have no pass@k."""
    dying = await open_evaluator(bus, tmp_path, epoch="a", logged=[], num_samples=1)
    evaluating = asyncio.create_task(dying.evaluate(4, 7, has_received_all=is_complete, on_held_out=None))
    first, *_ = await take_prompts(bus)
    await dying.receive(played(first, tiny_model_path, rewards=[1.0]))
    await end_task(evaluating)
    weights = WeightSnapshot.take(7, NamedWeights.of(weights_of(7)), max_bucket_bytes=8192)
    KeptWeights.write(folder_of(tmp_path, 4) / "weights", weights)
    again = await open_evaluator(bus, tmp_path, epoch="b", logged=[], num_samples=4, holding=Holding())
    assert again.interrupted == (4, 7)
    going_on = asyncio.create_task(again.go_on(has_received_all=is_complete))
    for prompt in await take_prompts(bus):
        await again.receive(played(prompt, tiny_model_path, rewards=[1.0, 0.0, 0.0, 0.0]))
    await promptly(going_on)
    [row] = map(json.loads, (tmp_path / EVALUATIONS_FILE).read_text().splitlines())
    assert (row["sets"]["s"]["num_prompts"], row["sets"]["s"]["score"]["value"]) == (NUM_PROMPTS, 0.25)


async def test_a_group_of_no_evaluation_is_ignored(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """It is of an evaluation that is over, or of another trainer's."""
    evaluator = await open_evaluator(bus, tmp_path, epoch="a", logged=[])
    group = msgspec.structs.replace(make_group(tiny_model_path, index=0), purpose="s")
    await evaluator.receive(group)
    assert not await evaluator.fail(group.id, "cannot be read")
    assert not (tmp_path / EVALUATIONS_FILE).exists()
