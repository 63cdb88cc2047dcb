"""How often engines compute the prompt of a group whose samples a router places: calls, prompt tokens and cached ones
are counted as the trainer counts them."""

import asyncio
import contextlib
import itertools

from penstock.bus.connection import Bus
from penstock.testing.paced_engine import Pace, PacedEngine
from penstock.v1 import generate_pb2
from services.rollout.testing.weight_reader import WeightReader
from tests.support.router.routers import Caller, router
from tests.support.waiting import promptly

NUM_GROUPS, NUM_SAMPLES, PROMPT = 4, 4, [5, 6, 7, 8, 9]
SLOTS = NUM_GROUPS * NUM_SAMPLES // 2
"""Of each of two replicas, so that all samples are played at once."""
FIRST_TOKEN_S = 0.2
"""Long enough for samples that nothing holds back to begin before their prompt is cached."""


async def test_each_group_is_prefilled_once_although_two_replicas_share_the_groups(steady_bus: Bus) -> None:
    """Each sample is one call, all at the same time; both replicas play groups, and no group has its prompt computed
    on both, or twice on one."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                PacedEngine(
                    steady_bus,
                    replica_id=f"r{number}",
                    max_running=SLOTS,
                    pace=lambda _: Pace(num_tokens=1, token_s=FIRST_TOKEN_S),
                    weights=WeightReader(),
                ).running()
            )
            for number in range(2)
        ]
        caller = await stack.enter_async_context(router(steady_bus))
        await caller.until_routable(2)
        calls = [(group, sample) for group in range(NUM_GROUPS) for sample in range(NUM_SAMPLES)]
        ends = await promptly(asyncio.gather(*(play(caller, *call) for call in calls)))
    by_group = [
        [end for (number, _), end in zip(calls, ends, strict=True) if number == group] for group in range(NUM_GROUPS)
    ]
    replicas = [{end.replica_id for end in of_group} for of_group in by_group]
    assert [len(each) for each in replicas] == [1] * NUM_GROUPS
    assert set(itertools.chain(*replicas)) == {"r0", "r1"}
    computed = [sum(end.usage.num_prompt_tokens - end.usage.num_cached_tokens for end in each) for each in by_group]
    assert computed == [len(PROMPT)] * NUM_GROUPS
    assert sum(engine.num_streams for engine in engines) == NUM_GROUPS * NUM_SAMPLES


async def play(caller: Caller, group: int, sample: int) -> generate_pb2.GenerateChunk:
    """The last chunk of a sample's only turn."""
    stream = caller.stream(f"g{group}/{sample}", group_id=f"g{group}", input_ids=PROMPT)
    *_, last = [chunk async for chunk in stream]
    return last
