"""The metrics of a step: what they count, and by whose definition."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.records import Group, Turn
from penstock.verdict_status import UNJUDGED
from services.trainer.admission.group_state import GroupCounts
from services.trainer.telemetry.step_metrics import StepClock, describe_batch, describe_groups, prefill_ratio
from tests.support.trainer.groups import make_group
from tests.support.waiting import settled


def test_unjudged_samples_are_those_of_the_records(tiny_model_path: Path) -> None:
    """Every status of `UNJUDGED` counts, and no other: training leaves out exactly the same samples."""
    statuses = ("OK", "NO_ANSWER", *sorted(UNJUDGED))
    group = make_group(tiny_model_path, index=3, rewards=[0.0] * len(statuses))
    samples = []
    for sample, status in zip(group.samples, statuses, strict=True):
        verdict = msgspec.structs.replace(sample.verdict, status=status)
        if status in UNJUDGED:
            with pytest.raises(ValueError, match=f"contradicts a verdict of {status}"):
                msgspec.structs.replace(sample, verdict=verdict)
        reward = None if status in UNJUDGED else sample.reward
        samples.append(msgspec.structs.replace(sample, verdict=verdict, reward=reward))
    described = describe_batch([msgspec.structs.replace(group, samples=tuple(samples))])
    assert described["num_unjudged_samples"] == len(UNJUDGED) == 4
    assert described["groups"] == [3]


def test_samples_that_ran_out_of_time_are_counted_apart_from_truncated_ones(tiny_model_path: Path) -> None:
    """A deadline says nothing of a response's length: it is slow, not long."""
    group = make_group(tiny_model_path)
    endings = ("stop", "length", "deadline", "deadline")
    samples = tuple(
        msgspec.structs.replace(sample, finish_reason=ending)
        for sample, ending in zip(group.samples, endings, strict=True)
    )
    described = describe_batch([msgspec.structs.replace(group, samples=samples)])
    assert (described["num_truncated_samples"], described["num_deadline_samples"]) == (1, 2)
    assert described["truncated_fraction"] == 1 / 4


def test_what_became_of_groups_is_told_in_groups_and_tokens() -> None:
    """Work that was done twice or for nothing shows in metrics.jsonl with its price."""
    counts = GroupCounts(rejected=3, rejected_tokens=30, redrawn=4, redrawn_tokens=40, lost=5, failed=6)
    told = describe_groups(counts, num_duplicate=7, num_unreadable=8)
    assert (told["num_stale_groups"], told["num_stale_tokens"]) == (3, 30)
    assert (told["num_redrawn_groups"], told["num_redrawn_tokens"]) == (4, 40)
    assert (told["num_lost_groups"], told["num_failed_groups"]) == (5, 6)
    assert (told["num_duplicate_groups"], told["num_unreadable_groups"]) == (7, 8)


def test_the_parts_of_a_step_add_up() -> None:
    """Each part ends where the next begins, and may come again; the whole includes what comes after the last."""
    times = iter((10.0, 12.0, 15.0, 19.0, 23.0, 28.0))
    clock = StepClock(now=lambda: next(times))
    for part in ("wait_s", "train_s", "wait_s", "train_s"):
        clock.lap(part)
    others = dict.fromkeys(
        ("data_wait_s", "demonstration_wait_s", "push_wait_s", "checkpoint_wait_s", "evaluation_wait_s"), 0.0
    )
    assert clock.seconds() == {"wait_s": 6.0, "train_s": 7.0, "step_s": 18.0} | others


def test_a_stopped_clock_stands() -> None:
    """What a step took is asked for after its push, which goes on beside the next step."""
    times = iter((10.0, 12.0, 15.0))
    clock = StepClock(now=lambda: next(times))
    clock.lap("wait_s")
    clock.stop()
    assert clock.seconds() == clock.seconds()
    assert (clock.seconds()["wait_s"], clock.seconds()["step_s"]) == (2.0, 5.0)


async def test_the_final_times_of_a_step_are_those_of_its_end() -> None:
    """Whoever asks before the end waits for it."""
    times = iter((10.0, 12.0, 15.0, 19.0))
    clock = StepClock(now=lambda: next(times))
    asking = asyncio.create_task(clock.final_seconds())
    clock.lap("wait_s")
    await settled()
    assert not asking.done()
    clock.lap("checkpoint_wait_s")
    clock.stop()
    seconds = await asking
    assert (seconds["wait_s"], seconds["checkpoint_wait_s"], seconds["step_s"]) == (2.0, 3.0, 9.0)


def test_the_prefill_ratio_counts_what_was_computed_twice(tiny_model_path: Path) -> None:
    """A prompt is needed once per group, an observation once per sample, and what the policy said is cached."""
    group = make_group(tiny_model_path, index=0, rewards=[0.0, 1.0])

    def with_turns(*counts: tuple[tuple[int, int, int], ...]) -> Group:
        samples = [
            msgspec.structs.replace(
                sample,
                turns=tuple(
                    Turn(replica_id="a", num_prompt_tokens=prompt, num_cached_tokens=cached, num_output_tokens=output)
                    for prompt, cached, output in turns
                ),
            )
            for sample, turns in zip(group.samples, counts, strict=True)
        ]
        return msgspec.structs.replace(group, samples=tuple(samples))

    assert prefill_ratio([with_turns(((100, 0, 5),), ((100, 0, 9),))]) == 2.0
    assert prefill_ratio([with_turns(((100, 0, 5),), ((100, 99, 9),))]) == 1.01
    second_turn = (125, 104, 5)  # 20 of the observation, and the last token that the policy said
    assert prefill_ratio([with_turns(((100, 0, 5), second_turn), ((100, 100, 5),))]) == 121 / 120
