"""Groups of which no sample was judged, on a real bus."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.bus.connection import Bus
from penstock.errors import DataError
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.flow import open_flow, publish
from tests.support.waiting import HANG_S


async def test_nothing_but_unjudged_samples_ends_the_run_with_the_reason(bus: Bus, tiny_model_path: Path) -> None:
    """They would be trained without a gradient to the end of the run. A group that was judged, or whose rewards differ,
    ends a row of failures; one that was only cut short before its environment saw it does not."""
    typo = {"reward": None, "verdict": None, "finish_reason": "error", "error": "environment 'x': NameError: rewrad"}
    late = typo | {"finish_reason": "deadline", "error": "the runner took longer than 900 s"}
    cut: dict[str, Any] = {"reward": 0.0, "finish_reason": "length", "is_cut_short": True}
    cut_and_unjudged = cut | {"reward": None, "verdict": None}
    groups = [
        (late, late),
        ({"reward": 0.0, "finish_reason": "deadline"}, typo),
        (late, late),
        (cut, cut | {"reward": 1.0}),
        (late, late),
        (cut_and_unjudged, cut_and_unjudged),
        (cut, typo),
        (typo, typo),
    ]
    for index, (first, others) in enumerate(groups):
        group = make_group(tiny_model_path, index=index, version=1)
        changes = [first, *[others] * (len(group.samples) - 1)]
        samples = [msgspec.structs.replace(each, **change) for each, change in zip(group.samples, changes, strict=True)]
        await publish(bus, msgspec.structs.replace(group, samples=tuple(samples)))
    async with open_flow(bus, tiny_model_path, groups_per_step=8) as flow, asyncio.timeout(HANG_S):
        with pytest.raises(
            DataError, match=r"3 groups in a row failed.*number 7: no sample was judged; most often: .*rewrad"
        ):
            await flow.collector.run()
    assert (await bus.jetstream.stream_info(bus.dead.name)).state.messages == 5
