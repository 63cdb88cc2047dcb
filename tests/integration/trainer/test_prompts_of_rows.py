"""What a prompt on the bus has of its row."""

import asyncio
import json
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import consuming
from penstock.errors import DataError
from penstock.records import Limits, Prompt
from penstock.records.codec import decode
from services.trainer.admission.filters import FilterReason
from services.trainer.admission.group_state import GroupStatus
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.rows.example import Example
from services.trainer.telemetry.step_metrics import StepClock
from tests.support.trainer.groups import make_group, picture
from tests.support.trainer.runs.flow import num_prompts, open_flow, publish, running
from tests.support.trainer.runs.manual_clock import ManualClock
from tests.support.waiting import HANG_S, promptly, settled, until

TOOL = {"type": "function", "function": {"name": "zoom"}}


def dataset(tmp_path: Path, *rows: dict[str, Any]) -> Dataset:
    """Rows that choose for themselves, in order."""
    table = pa.Table.from_pylist([{"problem": "?", "answer": "1", **row} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {
        "profile_column": "profile",
        "environment_column": "env",
        "sampling_column": "sampling",
        "tools_column": "tools",
        "limits_column": "limits",
    }
    config = {**columns, "chat_template_kwargs": {"add_vision_id": True}}
    return open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), shuffle=False, **config))  # type: ignore[arg-type]


async def test_a_prompt_is_played_as_its_row_says(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """Its profile, environment, length of answers, tools, budgets, further columns; its source's template variables."""
    rows = dataset(
        tmp_path,
        {
            "profile": "math",
            "env": "tools",
            "sampling": {"max_new_tokens": 7},
            "tools": json.dumps([TOOL]),
            "limits": {"max_turns": 3},
            "level": 3,
        },
        {"profile": None, "env": None, "sampling": None, "tools": None, "limits": None, "level": None},
    )
    async with open_flow(bus, tiny_model_path, dataset=rows, groups_per_step=2) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        await flow.feeder.admit()
        async with consuming(bus, bus.prompts, "workers", ack_wait_s=60.0, max_ack_pending=10) as consumer:
            played = {}
            while len(played) < 2:
                for delivery in await consumer.fetch(2):
                    prompt = decode(delivery.payload, Prompt)
                    played[prompt.id.index] = prompt
                    await delivery.ack()
    assert all(prompt.chat_template_kwargs == {"add_vision_id": True} for prompt in played.values())
    first, second = (
        (
            prompt.profile,
            prompt.environment,
            prompt.sampling.max_new_tokens,
            prompt.tools,
            prompt.limits,
            prompt.extra.get("level"),
        )
        for _, prompt in sorted(played.items())
    )
    assert first == ("math", "tools", 7, (TOOL,), Limits(max_turns=3), 3)
    assert second == ("geo3k", "single_turn", 512, (), Limits(), None)


UNSENDABLE = {
    "picture": ({"problem": "<image><image>?", "images": ["small.png", "large.png"]}, r"\d+ bytes are more than"),
    "text": ({"problem": "?" * 5000}, r"of \d+ bytes is over what"),
    "tokens": ({"sampling": {"max_new_tokens": 513}}, r"max_new_tokens = 513 is above"),
}
"""Rows, and what is wrong with them on a bus that takes 5,000 bytes."""


def beside_others(tmp_path: Path, row: dict[str, Any], *, wrong_rows: str) -> Dataset:
    """A row between two that can be sent."""
    (tmp_path / "small.png").write_bytes(picture(0))
    (tmp_path / "large.png").write_bytes(picture(1, size=(224, 224)) + bytes(5000))
    empty = {"sampling": None, "images": []}
    rows = [{"problem": "?", "answer": "1", **empty, **each} for each in ({}, row, {})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = {"path": str(tmp_path / "a.parquet"), "sampling_column": "sampling", "wrong_rows": wrong_rows}
    return open_dataset(DataConfig(shuffle=False, **config))  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "reason"), UNSENDABLE.values(), ids=UNSENDABLE)
async def test_a_row_that_cannot_be_sent_ends_the_run_by_its_name(
    bus: Bus, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], reason: str
) -> None:
    """The file and the number of the row in it, by which a person finds it."""
    monkeypatch.setattr(Bus, "max_payload_bytes", lambda *_: 5000)
    rows = beside_others(tmp_path, row, wrong_rows="refuse")
    async with open_flow(bus, tiny_model_path, dataset=rows, groups_per_step=2) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        with pytest.raises(DataError, match=rf"a\.parquet.*, row 1: .*{reason}.*; repair the row or remove it"):
            await flow.feeder.admit()


@pytest.mark.parametrize(("row", "reason"), UNSENDABLE.values(), ids=UNSENDABLE)
async def test_a_row_that_cannot_be_sent_is_dropped_as_wrong(
    bus: Bus, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], reason: str
) -> None:
    """The next one takes its place; it counts as filtered, and leaves no picture on the bus."""
    monkeypatch.setattr(Bus, "max_payload_bytes", lambda *_: 5000)
    rows = beside_others(tmp_path, row, wrong_rows="drop")
    async with open_flow(bus, tiny_model_path, dataset=rows, groups_per_step=2) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        with structlog.testing.capture_logs() as logs:
            await flow.feeder.admit()
        assert flow.ledger.counts.filtered_by_reason == {"wrong_row": 1}
        assert [flow.ledger.status(index) for index in range(3)] == [
            GroupStatus.ADMITTED,
            GroupStatus.FILTERED,
            GroupStatus.ADMITTED,
        ]
    (dropped,) = [entry["reason"] for entry in logs if entry["event"] == "data.wrong_row_dropped"]
    assert re.search(rf"a\.parquet.*, row 1: .*{reason}", dropped)
    assert await num_prompts(bus) == 2
    assert (await bus.jetstream.stream_info(bus.images.name)).state.messages == 0


async def test_a_row_cannot_have_more_tokens_than_the_run(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """The room in the context was computed for the run's."""
    rows = dataset(
        tmp_path, {"profile": None, "env": None, "sampling": {"max_new_tokens": 513}, "tools": None, "limits": None}
    )
    async with open_flow(bus, tiny_model_path, dataset=rows) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        with pytest.raises(DataError, match=r"max_new_tokens = 513 is above sampling\.max_new_tokens = 512; raise"):
            await flow.feeder.admit()


async def test_rows_that_wait_for_downloads_leave_threads_for_others(
    bus: Bus, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are paused for a push, and the trainer verifies it in a thread beside."""
    has_begun, is_downloaded = threading.Event(), threading.Event()
    read = Dataset.playable

    def download(rows: Dataset, position: int) -> Example | FilterReason:
        has_begun.set()
        assert is_downloaded.wait(HANG_S)
        return read(rows, position)

    monkeypatch.setattr(Dataset, "playable", download)
    async with open_flow(bus, tiny_model_path, groups_per_step=32) as flow, asyncio.TaskGroup() as tasks:
        flow.announce(1)
        tasks.create_task(flow.feeder.admit())
        try:
            await until(has_begun.is_set)
            await promptly(asyncio.to_thread(lambda: None))
        finally:
            is_downloaded.set()
    assert await num_prompts(bus) == 32


async def _are_published(bus: Bus, number: int) -> bool:
    return await num_prompts(bus) == number


async def test_a_row_that_takes_long_holds_up_no_other(
    bus: Bus, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are admitted together."""
    is_downloaded, read = threading.Event(), Dataset.playable

    def download(rows: Dataset, position: int) -> Example | FilterReason:
        if position == 0:
            assert is_downloaded.wait(HANG_S)
        return read(rows, position)

    monkeypatch.setattr(Dataset, "playable", download)
    async with open_flow(bus, tiny_model_path, groups_per_step=40) as flow, asyncio.TaskGroup() as tasks:
        flow.announce(1)
        tasks.create_task(flow.feeder.admit())
        try:
            await until(partial(_are_published, bus, 39))
        finally:
            is_downloaded.set()
    assert await num_prompts(bus) == 40


async def test_rows_of_the_next_step_are_read_while_the_gate_is_closed(
    bus: Bus, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompts go out without another read when it opens, and no row is read that the run does not come to."""
    reads, read = list[int](), Dataset.playable

    def note(rows: Dataset, position: int) -> Example | FilterReason:
        reads.append(position)
        return read(rows, position)

    monkeypatch.setattr(Dataset, "playable", note)
    async with running(bus, tiny_model_path, groups_per_step=4) as flow:
        flow.position.num_steps = 2
        flow.announce(1)
        await until(lambda: len(reads) == 8)
        assert (flow.ledger.next_index, flow.ledger.num_admissible(2)) == (4, 0)
        for index in range(4):
            await publish(bus, make_group(tiny_model_path, index=index, version=1))
        await flow.next_batch(1)
        flow.ledger.finish_training()
        flow.position.advance()
        flow.announce(2)
        await until(partial(_are_published, bus, 8))
    assert sorted(reads) == list(range(8))


async def test_a_batch_waits_for_data_until_its_prompts_are_out(
    bus: Bus, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups are admitted at once, whatever their rows take; from then on it waits for their play."""
    is_downloaded, read = threading.Event(), Dataset.playable

    def download(rows: Dataset, position: int) -> Example | FilterReason:
        assert is_downloaded.wait(HANG_S)
        return read(rows, position)

    monkeypatch.setattr(Dataset, "playable", download)
    clock = ManualClock()
    async with running(bus, tiny_model_path, groups_per_step=2) as flow:
        step = StepClock(clock)
        flow.announce(1)
        try:
            waiting = asyncio.create_task(flow.batches.next_chunk(step))
            await until(lambda: flow.feeder.num_unsent == 2)
            await settled()
            clock.move(8.0)
        finally:
            is_downloaded.set()
        await until(lambda: flow.feeder.num_unsent == 0)
        await settled()
        clock.move(4.0)
        for index in range(2):
            await publish(bus, make_group(tiny_model_path, index=index, version=1))
        await promptly(waiting)
    assert (step.seconds()["data_wait_s"], step.seconds()["wait_s"]) == (8.0, 4.0)
