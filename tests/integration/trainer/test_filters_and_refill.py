"""Filters on a real bus: full batches of groups that teach something, whatever is filtered, and over a restart."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import consuming
from penstock.errors import DataError
from penstock.records import Prompt
from penstock.records.codec import decode, encode
from penstock.runtime.process import end_task
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.group_state import GroupStatus
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.prompt_length import PromptLimit
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.flow import Flow, num_prompts, num_stored, open_flow, publish, resumed, running
from tests.support.waiting import HANG_S, until

FILTERS = FilterConfig(zero_variance=True)
SPREAD, EQUAL, OVERLONG = "1", "2", "3"
"""Answers of rows whose samples differ in reward, do not, and are never played."""
ROWS = [SPREAD, EQUAL, EQUAL, OVERLONG, SPREAD, EQUAL, OVERLONG, SPREAD]


@pytest.fixture
def dataset(tmp_path: Path, tiny_model_path: Path) -> Dataset:
    """`ROWS`, shuffled."""
    path = tmp_path / "a.parquet"
    problems = ["long " * 100 if answer == OVERLONG else "short" for answer in ROWS]
    pq.write_table(pa.table({"problem": problems, "answer": ROWS}), path)
    limit = PromptLimit.of_run(tiny_model_path, context=100, max_new_tokens=8)
    return open_dataset(DataConfig(path=str(path)), seed=1, limit=limit)


@asynccontextmanager
async def worker(bus: Bus, model_path: Path, played: Counter[tuple[int, str]]) -> AsyncIterator[None]:
    """Plays every prompt and stores each third group twice; counts how often it played each index with its answer."""

    async def play() -> None:
        while True:
            for delivery in await prompts.fetch(8):
                prompt = decode(delivery.payload, Prompt)
                rewards = (1.0, 0.0, 0.0, 1.0) if prompt.golds == (SPREAD,) else (1.0,) * 4
                group = make_group(model_path, index=prompt.id.index, rewards=rewards, version=prompt.admitted_version)
                group = msgspec.structs.replace(group, id=prompt.id)
                await publish(bus, group)
                if prompt.id.index % 3 == 0:
                    await publish(bus, group, copy="/again")
                played[prompt.id.index, prompt.golds[0]] += 1
                await delivery.ack()

    async with consuming(bus, bus.prompts, "workers", ack_wait_s=60.0, max_ack_pending=100) as prompts:
        playing = asyncio.create_task(play())
        yield
        await end_task(playing)


async def train(flow: Flow, num_steps: int) -> list[list[int]]:
    """Train this many batches; returns their groups."""
    batches = []
    for _ in range(num_steps):
        batch = await flow.next_batch(flow.position.version)
        assert all(0 <= flow.position.version - finished.ready.oldest_version <= 1 for finished in batch)
        batches.append([finished.ready.index for finished in batch])
        flow.ledger.finish_training()
        flow.position.advance()
    return batches


async def test_batches_are_full_of_groups_that_differ_over_a_restart(
    bus: Bus, tiny_model_path: Path, dataset: Dataset
) -> None:
    """Nothing is lost and nothing trained twice; what was filtered is settled, and its prompt does not come back."""
    num_steps, settings = 7, {"groups_per_step": 3, "max_staleness": 1, "filters": FILTERS, "dataset": dataset}
    played: Counter[tuple[int, str]] = Counter()
    async with worker(bus, tiny_model_path, played):
        async with running(bus, tiny_model_path, **settings) as flow:
            flow.position.num_steps, flow.position.version = num_steps, 1
            batches = await train(flow, 2)
            checkpoint = flow.ledger.checkpoint()
            for receipt in flow.ledger.settle(checkpoint):
                await receipt.ack()
            filtered = [
                index
                for index, answer in played
                if answer == EQUAL and flow.ledger.status(index) is GroupStatus.SETTLED
            ]
            await train(flow, 1)  # lost when the trainer dies
        assert len(filtered) >= 3
        assert not [index for (index, answer), count in played.items() if answer == EQUAL and count > 1]

        state = json.loads(json.dumps(checkpoint.state))
        settings |= {"state": state, "trainer_epoch": "b"}
        at = {"num_steps": num_steps, "step": 2, "version": 7}  # what lost weights sampled is stale
        async with resumed(bus, tiny_model_path, **at, **settings) as flow:
            batches += await train(flow, num_steps - 2)
            ledger = flow.ledger
            assert (ledger.num_untrained, ledger.counts.failed, ledger.counts.lost) == (0, 0, 0)
            await until(partial(_has_everything, bus, flow))
            await flow.settle()
    assert [played[index, EQUAL] for index in filtered] == [1] * len(filtered), "not after the restart, either"
    assert [len(batch) for batch in batches] == [3] * num_steps
    trained = [index for batch in batches for index in batch]
    assert len(set(trained)) == len(trained) == ledger.counts.trained
    answers = {index: dataset[index].golds[0] for index in range(max(trained) + 1)}
    assert sorted(trained) == [index for index, answer in answers.items() if answer == SPREAD], "none left out"
    assert all(ledger.status(index) is GroupStatus.SETTLED for index in answers)
    num_beyond = sum(ledger.status(index) is GroupStatus.SETTLED for index in range(len(answers), len(answers) + 20))
    counts = ledger.counts
    assert counts.filtered == sum(answer != SPREAD for answer in answers.values()) + num_beyond
    assert counts.filtered_by_reason.keys() == {"zero_variance", "overlong_prompt"}
    assert counts.filtered_tokens == (3 + 4 + 5 + 6) * counts.filtered_by_reason["zero_variance"]
    assert OVERLONG not in {answer for _, answer in played}
    assert await num_stored(bus) == 0


async def test_without_staleness_the_batch_is_of_one_version(bus: Bus, tiny_model_path: Path, dataset: Dataset) -> None:
    """Groups in place of filtered ones are admitted at the published version too, and no others are."""
    played: Counter[tuple[int, str]] = Counter()
    async with (
        worker(bus, tiny_model_path, played),
        running(bus, tiny_model_path, groups_per_step=4, filters=FILTERS, dataset=dataset) as flow,
    ):
        for version in (1, 2, 3):
            batch = await flow.next_batch(version)
            assert {finished.ready.oldest_version for finished in batch} == {version}
            assert len(batch) == 4
            flow.ledger.finish_training()
            assert flow.ledger.num_untrained == 0


async def test_a_filtered_groups_message_leaves_with_a_checkpoint_and_its_images_are_not_fetched(
    bus: Bus, tiny_model_path: Path
) -> None:
    """It ends a row of failures, for it is sound."""
    equal = make_group(tiny_model_path, index=0, rewards=[1.0] * 4)
    samples = [msgspec.structs.replace(sample, sequences=sample.sequences) for sample in equal.samples]
    samples[0] = msgspec.structs.replace(
        samples[0], sequences=(msgspec.structs.replace(samples[0].sequences[0], images=("0" * 64,)),)
    )
    equal = msgspec.structs.replace(equal, samples=tuple(samples))
    await bus.publish(bus.groups, encode(equal), message_id=equal.id.message)
    await publish(bus, make_group(tiny_model_path, index=1))
    async with running(bus, tiny_model_path, filters=FILTERS) as flow:
        flow.collector.streak.fail(9, "an earlier one")
        (finished,) = await flow.next_batch(1)
        assert finished.ready.index == 1
        assert flow.ledger.status(0) is GroupStatus.FILTERED
        assert (flow.ledger.counts.filtered, flow.ledger.counts.lost, flow.ledger.counts.failed) == (1, 0, 0)
        assert await num_stored(bus) == 2
        flow.ledger.finish_training()
        assert await flow.settle() == 2
    assert await num_stored(bus) == 0


async def test_masked_samples_reach_the_batch_as_such(bus: Bus, tiny_model_path: Path) -> None:
    """The collector hands on what the filters decided, and what to count of a group that they leave out."""
    for index, rewards in enumerate([(1.0,) * 4, (1.0, 0.0, 0.0, 1.0)]):
        group = make_group(tiny_model_path, index=index, rewards=rewards)
        cut = msgspec.structs.replace(group.samples[2], finish_reason="length")
        await publish(bus, msgspec.structs.replace(group, samples=(*group.samples[:2], cut, group.samples[3])))
    filters = FilterConfig(truncated="mask", zero_variance=True)
    async with running(bus, tiny_model_path, filters=filters) as flow:
        (finished,) = await flow.next_batch(1)
        flow.ledger.finish_training()
    assert (finished.ready.index, finished.ready.masked) == (1, (False, False, True, False))
    assert flow.ledger.counts.affected["truncated_masked"] == 2


async def test_nothing_but_overlong_prompts_ends_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """Rows beyond those that are read at the start: they would be passed over for ever."""
    limit = PromptLimit.of_run(tiny_model_path, context=9, max_new_tokens=8)
    dataset = open_dataset(DataConfig(), limit=limit)
    async with open_flow(bus, tiny_model_path, groups_per_step=4, dataset=dataset) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        with pytest.raises(
            DataError, match=r"256 of the last 256 groups were filtered .*raise rollout\.context_length"
        ):
            await flow.feeder.run()
    assert await num_prompts(bus) == 0


async def _has_everything(bus: Bus, flow: Flow) -> bool:
    return not await num_prompts(bus) and await flow.collector.has_everything()
