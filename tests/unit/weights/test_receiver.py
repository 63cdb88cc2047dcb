"""WeightReceiver: whatever happens to a push, the engine ends with whole weights, or BROKEN and healed by the next."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.v1.common_pb2 import REPLICA_STATE_BROKEN, REPLICA_STATE_READY, REPLICA_STATE_UPDATING
from penstock.weights.manifest import Manifest, specs_of
from penstock.weights.weight_files import write_weight_files
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver
from tests.support.waiting import promptly, until
from tests.support.weights.recorded_sink import (
    DIGESTS,
    MANIFEST,
    RecordedSink,
    close_receivers,
    finish,
    group,
    push,
    receiver,
)


@pytest.fixture(autouse=True)
async def _receivers_are_closed() -> AsyncIterator[None]:
    yield
    await close_receivers()


async def test_a_complete_push() -> None:
    """Every stage in order; the version changes at commit; the next push keeps the group, another epoch changes it."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 1)
    assert sink.calls == [
        "join g1", "pause", "begin", "load a", "load b", "end", "digests xxh3", "version 1", "resume",
    ]  # fmt: skip
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)
    sink.calls.clear()
    await push(one, "p2", 2)
    assert sink.calls[0] == "pause"
    sink.calls.clear()
    await push(one, "p3", 3, group_name="g2")
    assert sink.calls[:3] == ["leave g1", "join g2", "pause"]
    assert sink.failures == []


async def test_stages_come_in_order_and_belong_to_the_push() -> None:
    """A stage out of turn or of another push is refused and ends nothing."""
    sink = RecordedSink()
    one = await receiver(sink)
    with pytest.raises(NotReadyError, match="prepare it first"):
        await one.pause("p1")
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    for call in (one.receive("p1"), one.verify("p1", DIGESTS), one.commit("p1")):
        with pytest.raises(NotReadyError, match="needs it"):
            await call
    with pytest.raises(NotReadyError, match="is not prepared"):
        await one.pause("p0")
    with pytest.raises(NotReadyError):
        await one.abort("p0", "not mine")
    await one.pause("p1")
    assert one.state == REPLICA_STATE_UPDATING


@pytest.mark.parametrize("version", [0, 4])
async def test_versions_only_grow(version: int) -> None:
    """A push older than what is held is refused; the same version again is not (it may heal)."""
    one = await receiver(RecordedSink())
    await push(one, "p1", 5)
    with pytest.raises(InvalidRequestError, match="versions only grow"):
        await one.prepare("p2", version, group(), MANIFEST, deadline_s=30.0)
    await push(one, "p3", 5)


async def test_an_older_version_that_may_replace_a_newer_one_ends_what_runs() -> None:
    """Before the pause, and again at commit, when calls have come that may want the newer version."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 5)
    await push(one, "p2", 5, replaces_newer=True)
    assert sink.failures == []
    await push(one, "p3", 4, replaces_newer=True)
    assert (one.state, one.version) == (REPLICA_STATE_READY, 4)
    assert [reason.partition(",")[0] for reason in sink.failures] == ["the engine is given an older version"] * 2
    await push(one, "p4", 6)
    assert (one.version, len(sink.failures)) == (6, 2)


@pytest.mark.parametrize("stage", ["begin", "load a", "load b", "end", "digests xxh3", "version 2"])
async def test_a_failure_before_commit(stage: str) -> None:
    """BROKEN from the first byte on; before that the old weights serve on. The next push heals."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 1)
    sink.fail_at = stage
    with pytest.raises(UnavailableError, match="failed"):
        await push(one, "p2", 2)
    touched = stage != "begin"
    assert one.state == (REPLICA_STATE_BROKEN if touched else REPLICA_STATE_READY)
    assert one.version == 1
    assert bool(sink.failures) == touched
    assert (sink.calls[-2:] == ["resume", "leave g1"]) != touched  # out of the group, others may wait for it
    assert await one.abort("p2", "the trainer says so too") == one.state
    sink.fail_at = ""
    await push(one, "p3", 2, group_name="g2")
    assert (one.state, one.version) == (REPLICA_STATE_READY, 2)


async def test_broken_stays_broken_until_a_push_is_complete() -> None:
    """A push that is given up before it touches anything does not make broken weights whole."""
    sink = RecordedSink()
    one = await receiver(sink)
    sink.fail_at = "load b"
    with pytest.raises(UnavailableError):
        await push(one, "p1", 1)
    sink.fail_at = ""
    await one.prepare("p2", 1, group("g2"), MANIFEST, deadline_s=30.0)
    await one.pause("p2")
    assert await one.abort("p2", "changed its mind") == REPLICA_STATE_BROKEN
    assert "resume" not in sink.calls
    await push(one, "p3", 1, group_name="g3")
    assert one.state == REPLICA_STATE_READY


@pytest.mark.parametrize(
    ("last", "state"),
    [("prepare", REPLICA_STATE_READY), ("pause", REPLICA_STATE_READY), ("receive", REPLICA_STATE_BROKEN),
     ("verify", REPLICA_STATE_BROKEN)],
)  # fmt: skip
async def test_a_trainer_that_vanishes_costs_its_own_deadline(last: str, state: int) -> None:
    """The push ends at the deadline that the trainer set, and generation continues wherever weights are sound."""
    sink = RecordedSink()
    one = await receiver(sink)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=0.2)
    stages = {"pause": one.pause, "receive": one.receive, "verify": lambda push_id: one.verify(push_id, DIGESTS)}
    for name in tuple(stages)[: ("prepare", *stages).index(last)]:
        await stages[name]("p1")
    await until_ended(one)
    assert one.state == state
    assert one.version == 0
    assert ("resume" in sink.calls) == (last == "pause")


async def until_ended(one: WeightReceiver) -> None:
    """The prepared push has ended, and what it left was cleaned up."""
    watchdog = one._watchdog
    assert watchdog is not None
    await promptly(watchdog)
    with pytest.raises(NotReadyError, match="is not prepared"):
        await one.pause("p1")


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 60.5, float("nan")])
async def test_a_deadline_out_of_bounds_is_refused(deadline_s: float) -> None:
    """When the push is announced, with the settings to change, and before anything has happened."""
    sink = RecordedSink()
    one = await receiver(sink)
    with pytest.raises(InvalidRequestError, match=r"deadline_s = .*at most 60; .*transfer_timeout_s"):
        await one.prepare("p1", 1, group(), MANIFEST, deadline_s=deadline_s)
    assert sink.calls == []


async def test_a_hanging_stage_ends_at_the_deadline() -> None:
    """A broadcast that never ends is an error of the stage, and the engine is BROKEN."""
    sink = RecordedSink()
    sink.hang_at = "load b"
    broken = asyncio.Event()
    one = await receiver(sink, on_change=lambda: broken.set() if one.state == REPLICA_STATE_BROKEN else None)
    with pytest.raises((DeadlineError, UnavailableError)):
        await push(one, "p1", 1, deadline_s=0.2)
    await promptly(broken.wait())


async def test_a_version_never_stands_for_two_sets_of_weights() -> None:
    """Two trainers that publish one version: the second set is not committed, and a newer version heals."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 5)
    await push(one, "p2", 5)  # a restarted trainer publishes the same weights again
    others = sink.held = {"a": 7, "b": 8}
    with pytest.raises(NotReadyError, match=r"policy_version = 5.*two trainers"):
        await push(one, "p3", 5, digests=others)
    assert (one.state, one.version) == (REPLICA_STATE_BROKEN, 5)
    await push(one, "p4", 6, group_name="g2", digests=others)
    assert (one.state, one.version) == (REPLICA_STATE_READY, 6)


async def hanging() -> tuple[WeightReceiver, "asyncio.Task[None]"]:
    """A receiver and its push p1, which hangs while it loads."""
    sink = RecordedSink()
    sink.hang_at = "load b"
    one = await receiver(sink)
    running = asyncio.create_task(push(one, "p1", 1))
    await until(lambda: sink.calls[-1:] == ["load b"])
    return one, running


async def test_abort_ends_a_hanging_stage() -> None:
    """The trainer gives up: the stage that waits fails at once, saying why."""
    one, running = await hanging()
    assert await one.abort("p1", "another member died") == REPLICA_STATE_BROKEN
    with pytest.raises(UnavailableError, match="another member died"):
        await running


async def test_the_first_of_two_aborts_says_why() -> None:
    """The push's deadline and the trainer's abort in one moment."""
    one, running = await hanging()
    await asyncio.gather(one.abort("p1", "its deadline passed"), one.abort("p1", "the trainer says so too"))
    with pytest.raises(UnavailableError, match="its deadline passed"):
        await running


async def test_a_cancelled_call_ends_the_push() -> None:
    """The trainer's connection is gone in the middle of a stage."""
    one, running = await hanging()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: one.state == REPLICA_STATE_BROKEN)


async def test_a_commit_that_is_cut_off_lets_generation_continue() -> None:
    """The trainer's deadline passes while the engine resumes: its weights are sound, and they are the new ones."""
    sink = RecordedSink()
    ready = asyncio.Event()
    one = await receiver(sink, on_change=lambda: ready.set() if one.state == REPLICA_STATE_READY else None)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    await one.pause("p1")
    await one.receive("p1")
    await one.verify("p1", DIGESTS)
    sink.hang_at = "resume"
    committing = asyncio.create_task(one.commit("p1"))
    await asyncio.wait_for(sink.hanging.wait(), 20)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    assert one.state == REPLICA_STATE_UPDATING
    sink.released.set()
    await promptly(ready.wait())
    assert (one.version, sink.failures) == (1, [])


@pytest.mark.parametrize("ends_by", ["a failed stage", "an abort"])
async def test_a_clean_up_outlives_the_call_that_began_it(ends_by: str) -> None:
    """The trainer dies while the engine that it has failed resumes: generation goes on, and the next push waits."""
    sink = RecordedSink()
    sink.fail_at, sink.hang_at = ("begin", "resume") if ends_by == "a failed stage" else ("", "resume")
    ready = asyncio.Event()
    one = await receiver(sink, on_change=lambda: ready.set() if one.state == REPLICA_STATE_READY else None)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    await one.pause("p1")
    ending = asyncio.create_task(one.receive("p1") if sink.fail_at else one.abort("p1", "another member died"))
    await asyncio.wait_for(sink.hanging.wait(), 20)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    following = asyncio.create_task(one.prepare("p2", 1, group("g2"), MANIFEST, deadline_s=30.0))
    sink.released.set()
    await asyncio.wait_for(ready.wait(), 20)
    await following
    assert sink.calls[-3:] == ["resume", "leave g1", "join g2"]


async def test_of_two_pushes_prepared_at_once_the_later_one_is_received() -> None:
    """The first ends at once, its deadline with it: it ends nothing later, and no task stays behind."""
    sink = RecordedSink()
    sink.hang_at = "join g1"
    one = await receiver(sink)
    tasks = asyncio.all_tasks()
    first = asyncio.create_task(one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0))
    await asyncio.wait_for(sink.hanging.wait(), 20)
    second = asyncio.create_task(one.prepare("p2", 1, group("g2"), MANIFEST, deadline_s=30.0))
    await asyncio.sleep(0)  # until it waits for the first
    sink.released.set()
    await asyncio.gather(first, second)
    with pytest.raises(NotReadyError, match="is not prepared"):
        await one.pause("p1")
    await finish(one, "p2")
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)
    await one.close()
    assert asyncio.all_tasks() == tasks


async def test_a_new_push_supersedes_an_unfinished_one() -> None:
    """A trainer that was killed and started again need not wait for the deadline of its former self."""
    sink = RecordedSink()
    one = await receiver(sink)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    await one.pause("p1")
    await push(one, "p2", 1, group_name="g2")
    assert (one.state, one.version) == (REPLICA_STATE_READY, 1)


async def test_a_group_that_does_not_form_costs_its_deadline() -> None:
    """Generation never stopped, and the next push is taken."""
    sink = RecordedSink()
    sink.hang_at = "join g1"
    one = WeightReceiver(sink, prepare_deadline_s=-4.9, max_deadline_s=30.0)  # with the margin, 0.1 s
    await one.open()
    with pytest.raises(DeadlineError, match="preparing push 'p1' exceeded"):
        await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    await until(lambda: sink.calls[-1] == "leave g1")
    assert one.state == REPLICA_STATE_READY
    await push(one, "p2", 1, group_name="g2")


async def test_a_push_lasts_from_its_first_call() -> None:
    """The time in which its process group forms is part of it."""
    sink, formed = RecordedSink(), []

    async def join(source: rollout_pb2.BroadcastSource) -> None:
        formed.append(time.monotonic())

    sink.join_group = join  # type: ignore[method-assign]
    one = await receiver(sink)
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    assert one._push is not None
    assert one._push.started < formed[0]


async def test_a_drain_does_not_count_towards_the_deadline() -> None:
    """The push ends its deadline after it was prepared, plus the time that requests have to finish."""
    one = await receiver(RecordedSink())
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    push = one._push
    assert push is not None
    before = push.deadline
    await one.pause("p1", rollout_pb2.PAUSE_MODE_DRAIN, 12.0)
    assert push.deadline == before + 12.0


@pytest.mark.parametrize(("mode", "drain_s"), [(9, 0.0), (3, -1.0), (3, float("nan")), (3, float("inf"))])
async def test_a_pause_that_makes_no_sense_is_refused(mode: int, drain_s: float) -> None:
    """And ends nothing."""
    one = await receiver(RecordedSink())
    await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)
    with pytest.raises(InvalidRequestError, match=r"mode = 9|drain_s"):
        await one.pause("p1", mode, drain_s)  # type: ignore[arg-type]
    await one.pause("p1")


async def test_a_snapshot_takes_no_group_and_leaves_none(tmp_path: Path) -> None:
    """Of an epoch that goes on; what cannot be read is refused before anything happens."""
    sink = RecordedSink()
    one = await receiver(sink)
    await push(one, "p1", 1)
    folder = write_weight_files(tmp_path, 2, MANIFEST, [torch.zeros(8, dtype=torch.uint8)] * 2)
    sink.calls.clear()
    for version, where in ((3, folder), (2, tmp_path / "nowhere")):
        with pytest.raises(NotReadyError, match="weight files"):
            await one.prepare("p2", version, rollout_pb2.DiskSource(folder=str(where)), MANIFEST, deadline_s=30.0)
    await one.prepare("p2", 2, rollout_pb2.DiskSource(folder=str(folder)), MANIFEST, deadline_s=30.0)
    await finish(one, "p2")
    assert sink.calls == ["pause", "begin", "load a", "load b", "end", "digests xxh3", "version 2", "resume"]
    await push(one, "p3", 3)
    assert "join g1" not in sink.calls


async def test_a_group_must_have_a_rank_for_each_process() -> None:
    """A trainer that does not know of several would leave all of them waiting."""
    one = await receiver(RecordedSink(), num_ranks=2)
    with pytest.raises(InvalidRequestError, match="has 2 ranks from that on for this engine"):
        await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0)


@pytest.mark.parametrize(("num_ranks", "remedy"), [(1, "model.path"), (2, r"rollout\.tensor_parallel")])
async def test_other_shapes_are_refused(num_ranks: int, remedy: str) -> None:
    """Several processes may hold padded ones; one process holds another model."""
    one = await receiver(RecordedSink(), num_ranks=num_ranks)
    other = Manifest.plan(specs_of({"a": torch.zeros(3), "b": torch.zeros(2)}), max_bucket_bytes=8)
    source = group()
    source.world_size = 3
    with pytest.raises(InvalidRequestError, match=rf"a is float32\[3\], the engine holds float32\[2\]; .*{remedy}"):
        await one.prepare("p1", 1, source, other, deadline_s=30.0)


async def test_another_precision_is_refused_with_the_settings_to_change() -> None:
    """A push is not cast."""
    one = await receiver(RecordedSink())
    rounded = {name: torch.zeros(2, dtype=torch.bfloat16) for name in "ab"}
    other = Manifest.plan(specs_of(rounded), max_bucket_bytes=8)
    with pytest.raises(InvalidRequestError, match=r"holds float32\[2\]; set rollout\.dtype and trainer\.dtype alike"):
        await one.prepare("p1", 1, group(), other, deadline_s=30.0)


async def test_an_unknown_digest_is_refused() -> None:
    """When the push is announced, not when engines stand still."""
    one = await receiver(RecordedSink())
    with pytest.raises(InvalidRequestError, match="digest 'md5'"):
        await one.prepare("p1", 1, group(), MANIFEST, deadline_s=30.0, digest="md5")
