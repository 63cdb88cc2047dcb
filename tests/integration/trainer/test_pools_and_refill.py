"""Row pools on a real bus: rows that are always or never solved rest, and a killed run goes on as if it had lived."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import consuming
from penstock.errors import DataError
from penstock.records import Prompt
from penstock.records.codec import decode
from penstock.runtime.process import end_task
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.group_state import GroupStatus
from services.trainer.admission.pools import Pool, Row, RowPools
from services.trainer.data.config import DataConfig, PoolConfig
from services.trainer.data.dataset import Dataset, open_dataset
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.flow import NUM_STEPS, Flow, publish, resumed, running
from tests.support.waiting import promptly, until

SEED = 1
NUM_ROWS = 7
POOLS = PoolConfig(easy_chance=0.3, hard_chance=0.5)
REWARDS = ((1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.0))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Seven rows, in another order in each epoch."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"problem": ["?"] * NUM_ROWS, "answer": [str(row) for row in range(NUM_ROWS)]}), path)
    return open_dataset(DataConfig(path=str(path)), seed=SEED)


class RecordedPools(RowPools):
    """Pools that keep what each draw decided: the pool for which it was passed over, or None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start with no draws."""
        super().__init__(*args, **kwargs)
        self.draws: dict[int, Pool | None] = {}

    def draw(self, position: int, row: Row, *, is_in_hand: bool = False) -> Pool | None:
        """Draw, and keep what was decided."""
        self.draws[position] = super().draw(position, row, is_in_hand=is_in_hand)
        return self.draws[position]


@asynccontextmanager
async def worker(bus: Bus, model_path: Path) -> AsyncIterator[None]:
    """Plays prompts two at a time, the later one first, with rewards that their position decides."""

    async def play() -> None:
        while True:
            for delivery in reversed(await prompts.fetch(2)):
                prompt = decode(delivery.payload, Prompt)
                index = prompt.id.index
                rewards = REWARDS[index * index % len(REWARDS) if index % 3 else (index // 3) % len(REWARDS)]
                group = make_group(model_path, index=index, rewards=rewards, version=prompt.admitted_version)
                await publish(bus, msgspec.structs.replace(group, id=prompt.id))
                await delivery.ack()

    async with consuming(bus, bus.prompts, "workers", ack_wait_s=60.0, max_ack_pending=100) as prompts:
        playing = asyncio.create_task(play())
        yield
        await end_task(playing)


async def train(flow: Flow, num_steps: int) -> None:
    """Train this many batches."""
    for _ in range(num_steps):
        await flow.next_batch(flow.position.version)
        flow.ledger.finish_training()
        flow.position.advance()


def new_pools(state: str | None = None, *, next_position: int = 0, config: PoolConfig = POOLS) -> RecordedPools:
    """Pools of a run that starts, or that resumes."""
    num_rows = {"": NUM_ROWS}
    if state is None:
        return RecordedPools(config, seed=SEED, num_rows=num_rows)
    return RecordedPools.from_state(
        json.loads(state), config, seed=SEED, num_rows=num_rows, next_position=next_position
    )


@pytest.mark.slow
@pytest.mark.parametrize("zero_variance", [False, True])
@pytest.mark.parametrize("resumed_version", [4, 9])
async def test_a_killed_run_draws_what_the_unkilled_one_would_have_drawn(
    bus: Bus, tiny_model_path: Path, dataset: Dataset, *, zero_variance: bool, resumed_version: int
) -> None:
    """Whether the groups that were in hand are still fresh, or stale and played again; filtered groups count too."""
    settings: dict[str, Any] = {
        "groups_per_step": 3,
        "max_staleness": 1,
        "dataset": dataset,
        "filters": FilterConfig(zero_variance=zero_variance),
    }
    unkilled = new_pools()
    async with worker(bus, tiny_model_path), running(bus, tiny_model_path, **settings, pools=unkilled) as flow:
        flow.position.version = 1
        await train(flow, 12)
    for stream in (bus.prompts, bus.groups):
        await bus.purge(stream)

    async with worker(bus, tiny_model_path):
        killed = new_pools()
        async with running(bus, tiny_model_path, **settings, pools=killed, trainer_epoch="b") as flow:
            flow.position.version = 1
            await train(flow, 3)
            checkpoint, state = flow.ledger.checkpoint(), json.dumps(killed.state())
            for receipt in flow.ledger.settle(checkpoint):
                await receipt.ack()
            await train(flow, 3)  # lost when the trainer dies
        ledger_state = json.loads(json.dumps(checkpoint.state))
        revived = new_pools(state, next_position=ledger_state["next_index"])
        settings |= {"pools": revived, "state": ledger_state, "trainer_epoch": "c"}
        at = {"num_steps": NUM_STEPS, "step": 3, "version": resumed_version}
        async with resumed(bus, tiny_model_path, **at, **settings) as flow:
            await train(flow, 9)
            by_reason = flow.ledger.counts.filtered_by_reason
    assert min(revived.draws) == ledger_state["next_index"]
    for pools in (killed, revived):
        shared = pools.draws.keys() & unkilled.draws.keys()
        assert len(shared) >= 20
        assert {each: pools.draws[each] for each in shared} == {each: unkilled.draws[each] for each in shared}
    whole = killed.draws | revived.draws
    passed_over = Counter(pool for position, pool in whole.items() if position <= max(revived.draws))
    assert (by_reason["easy_pool"], by_reason["hard_pool"]) == (passed_over[Pool.EASY], passed_over[Pool.HARD])
    assert min(by_reason["easy_pool"], by_reason["hard_pool"]) > 2


async def test_a_row_that_is_still_played_holds_up_the_next_draw(
    bus: Bus, tiny_model_path: Path, dataset: Dataset
) -> None:
    """However much room the gate has; when the group is there, the run goes on."""
    async with running(bus, tiny_model_path, groups_per_step=NUM_ROWS + 5, dataset=dataset, pools=new_pools()) as flow:
        flow.announce(1)
        await until(lambda: flow.ledger.num_untrained >= NUM_ROWS)
        await promptly(flow.feeder.admit())
        assert flow.ledger.next_index == NUM_ROWS
        first = next(index for index in range(NUM_ROWS) if dataset.row_at(index) == dataset.row_at(NUM_ROWS))
        await publish(bus, make_group(tiny_model_path, index=first, rewards=(1.0, 0.0, 0.0, 1.0)))
        await until(lambda: flow.ledger.status(NUM_ROWS) is GroupStatus.ADMITTED)


async def test_a_run_whose_rows_are_all_solved_ends(bus: Bus, tiny_model_path: Path, dataset: Dataset) -> None:
    """With the reason, and what to change."""
    pools = new_pools(config=PoolConfig(easy_chance=0))
    for position in range(NUM_ROWS):
        pools.draw(position, dataset.row_at(position))
        pools.end(position, 1.0)
    async with running(bus, tiny_model_path, dataset=dataset, pools=pools) as flow:
        flow.position.version = flow.position.announced_version = 1
        with pytest.raises(DataError, match=r"none of the 7 rows is played any more: 7 in the easy pool"):
            await flow.feeder.admit()
