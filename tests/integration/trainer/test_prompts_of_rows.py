"""What a prompt on the bus has of its row."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.bus.connection import Bus
from penstock.bus.consumer import consuming
from penstock.errors import DataError
from penstock.records import Limits, Prompt
from penstock.records.codec import decode
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from tests.support.trainer.runs.flow import open_flow
from tests.support.waiting import HANG_S

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


async def test_a_row_cannot_have_more_tokens_than_the_run(bus: Bus, tmp_path: Path, tiny_model_path: Path) -> None:
    """The room in the context was computed for the run's."""
    rows = dataset(
        tmp_path, {"profile": None, "env": None, "sampling": {"max_new_tokens": 513}, "tools": None, "limits": None}
    )
    async with open_flow(bus, tiny_model_path, dataset=rows) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        with pytest.raises(DataError, match=r"max_new_tokens = 513 is above sampling\.max_new_tokens = 512; raise"):
            await flow.feeder.admit()
