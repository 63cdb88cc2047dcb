"""What becomes of groups is kept for people to read: by the parts of a trainer, on a real bus, as the recipe says."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from penstock.bus.connection import Bus
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.trainer.admission.config import FilterConfig
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.flow.crash_record import MAX_DEATHS, CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.run_logs import RunLogs, open_run_logs
from services.trainer.telemetry.episodes.log import TrainedGroup
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.flow import RUN, Flow, publish, running
from tests.support.waiting import until

FILTERS = FilterConfig(zero_variance=True)
NUM_EACH = 3
"""Groups of each kind."""


@asynccontextmanager
async def open_logs(folder: Path, model_path: Path, *, keep: str) -> AsyncIterator[RunLogs]:
    """The logs of a new run that keeps episodes so; written at the end."""
    recipe = Recipe.model_validate(
        {"model": {"path": model_path}, "run": {"dir": folder}, "episodes": {"keep": keep}, "trainer": {"port": 0}}
    )
    start: Any = SimpleNamespace(folder=folder, run_id=RUN, step=0, metrics=None, checkpoint=None)
    position, nobody = Position(num_steps=9, step=0, version=1), None
    async with AsyncExitStack() as stack:
        dataset = open_dataset(DataConfig())
        yield await open_run_logs(for_trainer(recipe), start, position, dataset, nobody, stack)  # type: ignore[arg-type]


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """The index of what was kept."""
    return [json.loads(line) for line in (folder / "episodes" / "index.jsonl").read_text().splitlines()]


def keep_with(flow: Flow, logs: RunLogs) -> None:
    """Let collector and batches keep what they leave out, as those of a trainer do."""
    flow.collector.episodes = flow.batches.episodes = logs.episodes


async def train_beside_all_that_is_left_out(bus: Bus, model_path: Path, flow: Flow) -> list[Any]:
    """A batch of version 2, after groups that are filtered, that failed, and that are stale; three of each."""
    for index in range(NUM_EACH):  # in turn, since nothing but failures would end the run
        await publish(bus, make_group(model_path, index=index, rewards=[1.0] * 4))
        failed = make_group(model_path, index=NUM_EACH + index)
        await publish(bus, msgspec.structs.replace(failed, samples=(), error="the image is broken"))
    trained = range(2 * NUM_EACH, 3 * NUM_EACH)
    for index in trained:
        await publish(bus, make_group(model_path, index=index, version=1))
    waiting = asyncio.create_task(flow.next_batch(2))
    await until(lambda: flow.ledger.counts.rejected == NUM_EACH)
    for index in trained:
        await publish(bus, make_group(model_path, index=index, attempt=1, version=2))
    batch = await waiting
    counts = flow.ledger.counts
    assert (counts.filtered, counts.failed) == (NUM_EACH, NUM_EACH)
    return batch


def num_of_each(entries: Sequence[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Groups by what became of them and why."""
    found = [(entry["outcome"], entry["reason"]) for entry in entries]
    return {each: found.count(each) for each in found}


@pytest.mark.parametrize(("keep", "num"), [("all", NUM_EACH), ("few", 2)])
async def test_groups_that_are_left_out_are_kept(
    bus: Bus, tiny_model_path: Path, tmp_path: Path, keep: str, num: int
) -> None:
    """Filtered, failed and stale ones, with the reason and, but for failed ones, their samples: all of them, or the
    first two of each kind."""
    settings: dict[str, Any] = {"groups_per_step": NUM_EACH, "filters": FILTERS}
    async with (
        open_logs(tmp_path, tiny_model_path, keep=keep) as logs,
        running(bus, tiny_model_path, **settings) as flow,
    ):
        keep_with(flow, logs)
        await train_beside_all_that_is_left_out(bus, tiny_model_path, flow)
    entries = entries_of(tmp_path)
    assert num_of_each(entries) == {
        ("filtered", "zero_variance"): num,
        ("failed", "the image is broken"): num,
        ("stale", "1 versions old, 0 allowed"): num,
    }
    num_samples = {"filtered": 4, "failed": 0, "stale": 4}
    assert all(len(entry["rewards"]) == num_samples[entry["outcome"]] for entry in entries)


async def test_nothing_is_kept_where_the_recipe_says_so(bus: Bus, tiny_model_path: Path, tmp_path: Path) -> None:
    """There is not even the folder."""
    settings: dict[str, Any] = {"groups_per_step": NUM_EACH, "filters": FILTERS}
    async with (
        open_logs(tmp_path, tiny_model_path, keep="off") as logs,
        running(bus, tiny_model_path, **settings) as flow,
    ):
        keep_with(flow, logs)
        await train_beside_all_that_is_left_out(bus, tiny_model_path, flow)
    assert not (tmp_path / "episodes").exists()


async def test_groups_that_are_given_up_unread_are_kept_with_the_reason(
    bus: Bus, tiny_model_path: Path, tmp_path: Path
) -> None:
    """Those that cannot be decoded, and those that killed the trainer, whose samples are not touched again."""
    await bus.publish(bus.groups, b"\xc1 garbage", message_id=f"{RUN}/0/0/a")
    for index in (1, 2):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    suspect = {"in_hand": [1], "deaths": {"1": MAX_DEATHS - 1}}
    record = tmp_path / "in_hand.json"
    record.write_text(json.dumps({"run_id": RUN, "reading": suspect}))
    async with (
        open_logs(tmp_path, tiny_model_path, keep="all") as logs,
        running(bus, tiny_model_path) as flow,
    ):
        keep_with(flow, logs)
        flow.collector.crashes = CrashRecord(record, run_id=RUN, is_resumed=True)
        (finished,) = await flow.next_batch(1)
    assert finished.ready.index == 2
    found = entries_of(tmp_path)
    assert [(each["index"], each["outcome"], each["rewards"]) for each in found] == [
        (0, "failed", []),
        (1, "failed", []),
    ]
    assert all(each["prompt"] and each["golds"] for each in found)
    assert f"died {MAX_DEATHS} times while it read group 1" in found[1]["reason"]
    assert all(each["reason"] == each["error"] for each in found)


async def test_a_step_s_metrics_say_how_many_groups_were_not_kept(
    bus: Bus, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock view` and `penstock status` raise an alarm by it."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with (
        open_logs(tmp_path, tiny_model_path, keep="all") as logs,
        running(bus, tiny_model_path) as flow,
    ):
        episodes = logs.episodes
        assert episodes is not None
        monkeypatch.setattr(episodes._files, "add", fail)
        keep_with(flow, logs)
        await publish(bus, make_group(tiny_model_path, index=0, version=1))
        (finished,) = await flow.next_batch(1)
        episodes.keep_trained(1, 1, [TrainedGroup(played=finished.played, ready=finished.ready, images={})], None)
        await until(lambda: episodes.num_dropped == 1)
        loop: Any = SimpleNamespace(
            ledger=flow.ledger,
            collector=flow.collector,
            feeder=flow.feeder,
            config=SimpleNamespace(max_staleness=0),
            episodes=episodes,
        )
        assert TrainingLoop._describe(loop, [finished])["num_episodes_dropped"] == 1


async def test_an_ordinary_group_writes_no_line(bus: Bus, tiny_model_path: Path) -> None:
    """What happens to each is in the spans. A line about a group names it, also that of one that cannot be read."""
    for index in range(4):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logged:
        async with running(bus, tiny_model_path, groups_per_step=4) as flow:
            assert len(await flow.next_batch(1)) == 4
            flow.ledger.finish_training()
            await flow.settle()
            assert [each for each in logged if each["log_level"] != "debug"] == []
            failed = make_group(tiny_model_path, index=4)
            await publish(bus, msgspec.structs.replace(failed, samples=(), error="the image is broken"))
            await publish(bus, make_group(tiny_model_path, index=0), copy="/again")
            await bus.publish(bus.groups, b"\xc1 garbage", message_id=f"{RUN}/5/0/a")
            await until(lambda: flow.ledger.counts.failed == 2)
    assert [(each["event"], each["group"]) for each in logged if each["log_level"] != "debug"] == [
        ("group.failed", f"{RUN}/4/0/a"),
        ("group.duplicate_ignored", f"{RUN}/0/0/a"),
        ("message.buried", f"{RUN}/5/0/a"),
        ("group.failed", f"{RUN}/5/0/a"),
    ]
