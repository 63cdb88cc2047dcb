"""An evaluation over the queues of a run, with nobody at the other end of them."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.connection import Stored
from penstock.errors import DataError, InvalidRequestError
from penstock.records import Group, GroupId, Prompt
from penstock.records.codec import decode
from penstock.runtime.process import end_task
from services.rollout.worker.episodes.tasks import make_task
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.evaluation import MAX_FAILURES_AT_FIRST, Evaluation
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.sets import open_sets
from tests.support.trainer.outcomes import appending_to
from tests.support.waiting import settled, until

NUM_ROWS = 40


class Server:
    """Stands in for the bus and its images: takes prompts, and may be slow to remove images."""

    def __init__(self) -> None:
        self.prompts = SimpleNamespace(name="prompts")
        self.num_prompts = 0
        self.num_looks = 0
        self.removing = asyncio.Event()
        """Set when images are being removed."""
        self.may_remove = asyncio.Event()
        self.may_remove.set()

    async def publish(self, *_: object, **__: object) -> Stored:
        self.num_prompts += 1
        return Stored(is_new=True, sequence=self.num_prompts)

    async def holds(self, *_: object) -> bool:
        self.num_looks += 1
        return False

    async def put_all(self, _: str, images: Sequence[bytes]) -> tuple[str, ...]:
        return ("0" * 64,) * len(images)

    async def remove(self, _: str) -> None:
        self.removing.set()
        await self.may_remove.wait()


def evaluation(server: Any, outcomes: list[PlayedPrompt], **given: Any) -> Evaluation:
    """One of the built-in problems."""
    config = EvaluationConfig(at_start=True, sets={"s": EvaluationSetConfig(num_prompts=NUM_ROWS)})

    async def has_received_none() -> bool:
        return False

    return Evaluation(
        open_sets(config, DataConfig(), reads_rows=False),
        bus=server,
        images=server,
        epoch="a",
        version=1,
        on_played=appending_to(outcomes),
        **{"run_id": "r", "has_received_all": has_received_none, **given},
    )


def failed(index: int) -> Group:
    """A row that nobody can play."""
    group_id = GroupId(run_id="r", index=index, attempt=0, trainer_epoch="a")
    return Group(id=group_id, num_samples=0, samples=(), worker_id="", error="the prompt is too long")


@pytest.mark.parametrize(("played", "goes_on"), [([], False), ([("s", 39)], True)], ids=["at first", "after others"])
async def test_rows_that_fail_end_it_only_if_none_was_played(
    played: Collection[tuple[str, int]], goes_on: bool
) -> None:
    """What an earlier start has played counts: it ended where the rows were that fail, and they come again at first."""
    server, outcomes = Server(), list[PlayedPrompt]()
    running = evaluation(server, outcomes, played=played)
    publishing = asyncio.create_task(running.run())
    await until(lambda: server.num_prompts >= MAX_FAILURES_AT_FIRST)
    for index in range(MAX_FAILURES_AT_FIRST - 1):
        await running.receive(failed(index))
    if goes_on:
        await running.receive(failed(MAX_FAILURES_AT_FIRST - 1))
    else:
        words = f"the first {MAX_FAILURES_AT_FIRST} prompts of evaluation.sets.s all failed; mend the set.* is too long"
        with pytest.raises(DataError, match=words):
            await running.receive(failed(MAX_FAILURES_AT_FIRST - 1))
    await end_task(publishing)
    assert len(outcomes) == MAX_FAILURES_AT_FIRST


async def test_a_row_that_cannot_be_sent_is_named_with_its_place() -> None:
    """The number of a row alone does not find it among the files of a set."""
    server = Server()

    async def publish(*_: object, **__: object) -> Stored:
        raise InvalidRequestError("the record is larger than 1 MiB")

    server.publish = publish  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"^evaluation\.sets\.s: [^,:]+, row \d+: the record is larger than 1 MiB;"):
        await evaluation(server, []).run()


async def test_a_group_that_is_received_when_it_is_stopped_has_no_outcome() -> None:
    """Its file of samples is closed by then; a resumed evaluation plays the row again."""
    server, outcomes = Server(), list[PlayedPrompt]()
    running = evaluation(server, outcomes)
    publishing = asyncio.create_task(running.run())
    await until(lambda: server.num_prompts > 0)
    server.may_remove.clear()
    receiving = asyncio.create_task(running.receive(failed(0)))
    await server.removing.wait()
    publishing.cancel()
    with suppress(asyncio.CancelledError):
        await publishing
    server.may_remove.set()
    await receiving
    assert outcomes == []


async def test_a_row_draws_the_same_in_every_evaluation() -> None:
    """Of each step, and also of one that an earlier start had begun: scores are of the same problems."""

    async def seeds_of(**given: Any) -> list[int]:
        prompts = list[Prompt]()

        async def publish(_stream: object, prompt: bytes, *, message_id: str) -> Stored:
            prompts.append(decode(prompt, Prompt))
            return Stored(is_new=True, sequence=len(prompts))

        server = Server()
        server.publish = publish  # type: ignore[method-assign]
        playing = asyncio.create_task(evaluation(server, [], **given).run())
        await until(lambda: len(prompts) == NUM_ROWS - len(given.get("played", ())))
        await end_task(playing)
        parts: Any = SimpleNamespace(prompt=(), grade=None, remaining_s=1.0)
        return [make_task(prompt, "0", parts, parts, parts).seed for prompt in prompts]

    seeds = await seeds_of(run_id="run-step-10")
    assert len(set(seeds)) == NUM_ROWS
    assert await seeds_of(run_id="run-step-20") == seeds
    played = [("s", row) for row in range(NUM_ROWS - 3)]
    assert await seeds_of(run_id="run-step-20", played=played) == seeds[NUM_ROWS - 3 :]


async def test_without_a_replica_one_prompt_waits_for_the_next() -> None:
    """Held-out replicas may all be gone when it begins."""
    server = Server()
    publishing = asyncio.create_task(evaluation(server, [], num_slots=0).run())
    await until(lambda: server.num_prompts == 1)
    await end_task(publishing)


async def test_a_row_whose_group_comes_while_lost_prompts_are_repeated_is_not_repeated() -> None:
    """Its worker was only slow. It would be counted again, and the evaluation end without another row."""
    server, outcomes, repeated = Server(), list[PlayedPrompt](), list[str]()
    again = [GroupId(run_id="r", index=index, attempt=1, trainer_epoch="a").message for index in range(NUM_ROWS)]

    async def has_received_all() -> bool:
        return True

    async def publish(_stream: object, _prompt: bytes, *, message_id: str) -> Stored:
        server.num_prompts += 1
        if message_id in again:
            repeated.append(message_id)
            if message_id == again[0]:
                await running.receive(failed(1))
        return Stored(is_new=True, sequence=server.num_prompts)

    server.publish = publish  # type: ignore[method-assign]
    running = evaluation(server, outcomes, has_received_all=has_received_all, silence_s=0.05)
    evaluating = asyncio.create_task(running.run())
    await until(lambda: again[3] in repeated)
    await end_task(evaluating)
    assert repeated[:3] == [again[0], again[2], again[3]]
    assert len(outcomes) == 1


async def test_prompts_are_published_beside_each_other() -> None:
    """Each takes a round trip; but few at once, for each waits for its answer no longer than a deadline."""
    server, may_answer = Server(), asyncio.Event()

    async def publish(*_: object, **__: object) -> Stored:
        server.num_prompts += 1
        await may_answer.wait()
        return Stored(is_new=True, sequence=server.num_prompts)

    server.publish = publish  # type: ignore[method-assign]
    running = asyncio.create_task(evaluation(server, []).run())
    await until(lambda: server.num_prompts == 16)
    await settled()
    assert server.num_prompts == 16
    may_answer.set()
    await until(lambda: server.num_prompts == NUM_ROWS)
    await end_task(running)


async def test_a_prompt_on_its_way_is_not_taken_for_lost() -> None:
    """Neither queue holds it, until the server has stored it."""
    server, is_stored, ids = Server(), asyncio.Event(), list[str]()

    async def has_received_all() -> bool:
        return True

    async def publish(*_: object, message_id: str) -> Stored:
        ids.append(message_id)
        if len(ids) == 1:
            await is_stored.wait()
        return Stored(is_new=True, sequence=len(ids))

    server.publish = publish  # type: ignore[method-assign]
    evaluating = evaluation(server, [], has_received_all=has_received_all, silence_s=0.0)
    running = asyncio.create_task(evaluating.run())
    await until(lambda: ids)
    await settled()
    assert (server.num_looks, running.done()) == (0, False)
    is_stored.set()
    await until(lambda: server.num_looks > 0)
    await end_task(running)
