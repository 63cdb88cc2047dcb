"""Groups of which no sample was judged, on a real bus."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.bus.connection import Bus
from penstock.errors import DataError
from penstock.names import SINGLE_TURN
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.flow import open_flow, publish
from tests.support.waiting import HANG_S


async def test_nothing_but_unjudged_samples_ends_the_run_with_the_reason(bus: Bus, tiny_model_path: Path) -> None:
    """They would be trained without a gradient to the end of the run. A group with a judged sample is sound, unless it
    was cut short before its environment saw it. One whose samples were all cut short is neither sound nor a failure."""
    typo = {"reward": None, "verdict": None, "finish_reason": "error", "error": "environment 'x': NameError: rewrad"}
    late = typo | {"finish_reason": "deadline", "error": "the runner took longer than 900 s"}
    cut = {"reward": 0.0, "finish_reason": "length"}
    cut_and_unjudged = {"reward": None, "verdict": None, "finish_reason": "length"}
    groups = [
        (SINGLE_TURN, cut, typo),
        ("x", {}, typo),
        ("x", late, late),
        ("x", cut_and_unjudged, cut_and_unjudged),
        ("x", cut, typo),
        ("x", typo, typo),
    ]
    for index, (environment, first, others) in enumerate(groups):
        group = make_group(tiny_model_path, index=index, version=1)
        changes = [first, *[others] * (len(group.samples) - 1)]
        samples = [msgspec.structs.replace(each, **change) for each, change in zip(group.samples, changes, strict=True)]
        await publish(bus, msgspec.structs.replace(group, environment=environment, samples=tuple(samples)))
    async with open_flow(bus, tiny_model_path, groups_per_step=6) as flow, asyncio.timeout(HANG_S):
        with pytest.raises(
            DataError, match=r"3 groups in a row failed.*number 5: no sample was judged; most often: .*rewrad"
        ):
            await flow.collector.run()
    assert (await bus.jetstream.stream_info(bus.dead.name)).state.messages == 3
