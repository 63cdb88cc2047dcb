"""The training loop's promises to those who come after a crash, and to a trainer that has taken over."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.buckets.lock import claim
from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.buckets.watch import watched
from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore, hash_of
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.errors import ConfigError, MissingImageError, SetupError, SupersededError
from penstock.records import GroupId
from penstock.records.published_version import read_published_version
from penstock.v1.common_pb2 import Replica
from penstock.v1.trainer_pb2 import PublishedVersion
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival, GroupStatus
from services.trainer.admission.ledger import GroupLedger
from services.trainer.assembly import _first_position, _open_groups
from services.trainer.background import Lane
from services.trainer.checkpoint.saving import CheckpointSaver
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.publication import Publication
from services.trainer.starting_point import find_starting_point
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.progress import Progress
from services.trainer.versions import first_version, open_versions
from tests.support.waiting import HANG_S, until


class PowerCutError(Exception):
    """The trainer dies."""


class Pushes:
    """A publisher without replicas, which keeps the versions that it was given."""

    def __init__(self, *, dies: bool = False) -> None:
        """Die in the first push if told so."""
        self.versions: list[int] = []
        self.rest = asyncio.Event()
        """Set when the second half of the replicas has the weights; pushes wait for it."""
        self.rest.set()
        self._dies = dies

    async def publish(self, version: int, *, on_half_served: Callable[[], None]) -> None:
        """Keep the version."""
        if self._dies:
            raise PowerCutError
        self.versions.append(version)
        on_half_served()
        await self.rest.wait()


class Receipt:
    """A message in hand."""

    def __init__(self) -> None:
        """Not acknowledged yet."""
        self.message_id = ""
        self.is_acked = False

    async def ack(self) -> None:
        """Note it."""
        self.is_acked = True


@dataclass
class Controller:
    """What a trainer publishes and saves with, at step 7 of version 7, with no model behind it."""

    position: Position
    ledger: GroupLedger[Any, Any]
    images: ImageStore
    publication: Publication
    saver: CheckpointSaver

    async def publish(self, version: int) -> None:
        """Publish the same weights as `version`."""
        self.position.version = version
        await self.publication.publish(version, version)  # type: ignore[arg-type]

    async def save(self) -> None:
        """Save a checkpoint and settle what it accounts for."""
        moment = self.saver.moment(self.position)
        await self.saver.write(moment)
        await self.saver.settle(moment)


async def open_controller(
    bus: Bus, folder: Path, *, epoch: str, pushes: Pushes, groups_per_step: int = 1
) -> Controller:
    """Take the trainer's lock."""
    lock = await claim(bus, "trainer", ttl_s=0.2)
    backend: Any = SimpleNamespace(save=lambda path, on_copied: (path / "model").mkdir())
    position = Position(num_steps=10, step=7, version=7, announced_version=7)
    ledger: GroupLedger[Any, Any] = GroupLedger(Gate(max_staleness=0, groups_per_step=groups_per_step))
    progress = Progress(run_id="run", num_steps=10)
    store = CheckpointStore(folder / "checkpoints", keep=2)
    publication = Publication(
        position=position,
        max_staleness=1,
        lock=lock,
        versions=await open_versions(bus),
        publisher=pushes,  # type: ignore[arg-type]
        feeder=SimpleNamespace(trainer_epoch=epoch, wake=lambda: None),  # type: ignore[arg-type]
        progress=progress,
        checkpoints_folder=store.folder,
    )
    images = ImageStore(bus)
    saver = CheckpointSaver(
        store=store,
        base_model=folder,
        backend=backend,
        ledger=ledger,
        pools=None,
        lock=lock,
        images=images,
        publication=publication,
        progress=progress,
        saved_version=7,
    )
    return Controller(position, ledger, images, publication, saver)


def settings_of(folder: Path, *, num_steps: int = 10) -> Any:
    """What says where a run in `folder` begins."""
    trainer = SimpleNamespace(num_steps=num_steps, max_staleness=2, keep_checkpoints=2)
    return SimpleNamespace(run=SimpleNamespace(folder=folder, name="run"), trainer=trainer)


async def test_stop_ends_a_run_whose_batches_are_always_ready() -> None:
    """A run that never waits for groups stops after the step in which the signal came."""
    nobody: Any = None
    stop, position = asyncio.Event(), Position(num_steps=10, step=3, version=4, announced_version=4)
    loop = TrainingLoop(
        config=nobody,
        folder=nobody,
        progress=Progress(run_id="run", num_steps=10),
        position=position,
        backend=nobody,
        computation=nobody,
        publisher=nobody,
        publication=nobody,
        ledger=nobody,
        feeder=nobody,
        collector=nobody,
        batches=nobody,
        checkpoints=SimpleNamespace(saved_version=4),  # type: ignore[arg-type]
        metrics=nobody,
        trace=nobody,
        trackers=nobody,
    )
    stop.set()
    async with asyncio.TaskGroup() as tasks:
        await loop._train_until(stop, tasks)
    assert position.step == 3


async def test_work_beside_the_loop_that_is_cancelled_is_an_error() -> None:
    """A push that vanished would never be announced, and the loop wait for its groups without end."""

    async def vanish() -> None:
        raise asyncio.CancelledError

    async with asyncio.TaskGroup() as tasks:
        lane = Lane(tasks)
        lane.start(vanish())
        with pytest.raises(RuntimeError, match="was cancelled"):
            await lane.free()


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every path below `folder`, with its inode and its content."""
    return {
        path: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"") for path in sorted(folder.rglob("*"))
    }


async def test_trainer_that_dies_while_it_pushes_never_reuses_the_number(bus: Bus, tmp_path: Path) -> None:
    """A replica may have got the weights although nobody announced them: their number is taken."""
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=Pushes(dies=True))
    with pytest.raises(PowerCutError):
        await trainer.publish(8)
    versions = await open_versions(bus)
    assert versions.published is None
    first = first_version(checkpoint=7, published=7, claimed=versions.newest_claimed, newest_held=0, max_staleness=0)
    assert first == 9


async def test_a_trainer_starts_beyond_every_version_that_anyone_knows(bus: Bus, tmp_path: Path) -> None:
    """By the staleness bound, so that all that was sampled is stale; after an orderly stop, at the version itself."""
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=Pushes())
    await trainer.save()
    held: dict[str, bytes] = {}
    settings = settings_of(tmp_path)

    async def first() -> Position:
        start = await find_starting_point(settings, bus)
        return _first_position(settings.trainer, start, SimpleNamespace(values=held))  # type: ignore[arg-type]

    assert await first() == Position(num_steps=10, step=7, version=7)
    await (await open_versions(bus)).announce(PublishedVersion(policy_version=8))
    assert (await first()).version == 8 + 3
    await (await open_versions(bus)).claim(PublishedVersion(policy_version=9))
    assert (await first()).version == 9 + 3
    held["e"] = write_replica(Replica(replica_id="e", address="h:1", policy_version=10))
    assert await first() == Position(num_steps=10, step=7, version=10 + 3)


async def test_groups_are_admitted_at_a_version_that_half_of_the_replicas_serve(bus: Bus, tmp_path: Path) -> None:
    """Nothing older may play them, so they need not wait for the announcement, which waits for the other half."""
    pushes = Pushes()
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=pushes)
    position, wakes = trainer.position, list[int | None]()
    trainer.publication.feeder.wake = lambda: wakes.append(position.admission_version)  # type: ignore[method-assign]
    pushes.rest.clear()
    pushing = asyncio.create_task(trainer.publish(8))
    await until(lambda: bool(pushes.versions))
    assert (position.announced_version, position.admission_version, position.num_steps_ahead) == (7, 8, 0)
    assert (await open_versions(bus)).published is None
    pushes.rest.set()
    await pushing
    assert (position.announced_version, position.admission_version) == (8, 8)
    assert wakes == [8, 8]
    position.advance()
    assert position.num_steps_ahead == 1


async def test_two_trainers_never_publish_the_same_number(bus: Bus, tmp_path: Path) -> None:
    """Even if both believe that they hold the lock: the one that claims second has read an old claim."""
    first, second = await open_versions(bus), await open_versions(bus)
    await first.claim(PublishedVersion(policy_version=8, trainer_epoch="a"))
    with pytest.raises(SupersededError):
        await second.claim(PublishedVersion(policy_version=8, trainer_epoch="b"))
    await first.claim(PublishedVersion(policy_version=9, trainer_epoch="a"))


async def test_the_announced_version_never_goes_back(bus: Bus) -> None:
    """Nor does a late announcement of the same version replace that of the trainer that took over."""
    late, too_late, successor = [await open_versions(bus) for _ in range(3)]
    await late.announce(PublishedVersion(policy_version=7, trainer_epoch="a"))
    await successor.announce(PublishedVersion(policy_version=9, trainer_epoch="b"))  # 7 was announced meanwhile
    for versions, number in ((late, 8), (late, 8), (too_late, 9)):
        with pytest.raises(SupersededError, match="policy version 9"):
            await versions.announce(PublishedVersion(policy_version=number, trainer_epoch="a"))
    assert (await open_versions(bus)).published == PublishedVersion(policy_version=9, trainer_epoch="b")
    await successor.announce(PublishedVersion(policy_version=9, trainer_epoch="b", checkpoint_step=3))
    origin = await (await bus.bucket("policy")).get("version.9")
    assert read_published_version(origin.value or b"").checkpoint_step == 3


async def test_trainer_that_is_replaced_while_it_acknowledges_does_not_announce(bus: Bus, tmp_path: Path) -> None:
    """The checkpoint is on disk; what the run's processes read is the successor's business."""
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=Pushes())

    class Replacing(Receipt):
        async def ack(self) -> None:
            await claim(bus, "trainer", ttl_s=0.0)

    trainer.ledger.admit(7)
    trainer.ledger.fail(0, 0)
    trainer.ledger.keep_receipt(0, Replacing())  # type: ignore[arg-type]
    with pytest.raises(SupersededError, match="another process has taken over as trainer"):
        await trainer.save()
    assert (await open_versions(bus)).published is None


async def test_trainer_that_was_replaced_touches_nothing_of_its_successor(bus: Bus, tmp_path: Path) -> None:
    """It was silent for too long: weights, groups and checkpoints are those of the one that took over."""
    pushes, receipt = Pushes(), Receipt()
    silent = await open_controller(bus, tmp_path, epoch="a", pushes=pushes)
    silent.ledger.admit(7)
    silent.ledger.fail(0, 0)
    silent.ledger.keep_receipt(0, receipt)  # type: ignore[arg-type]
    successor = await open_controller(bus, tmp_path, epoch="b", pushes=pushes)
    await successor.publish(8)
    await successor.save()
    checkpoints = snapshot(tmp_path)
    with pytest.raises(SupersededError, match="another process has taken over as trainer"):
        await silent.publish(8)
    with pytest.raises(SupersededError, match="another process has taken over as trainer"):
        await silent.save()
    assert pushes.versions == [8], "only the successor's weights went out"
    assert not receipt.is_acked
    assert snapshot(tmp_path) == checkpoints


@pytest.mark.parametrize("outcome", ["failed", "filtered"])
async def test_a_checkpoint_settles_the_groups_that_it_accounts_for(bus: Bus, tmp_path: Path, outcome: str) -> None:
    """Their messages leave the bus, and their images with them; a group that waits for its batch keeps both."""
    await bus.ensure_streams()
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=Pushes(), groups_per_step=2)
    await trainer.images.ensure()
    ids = [GroupId(run_id="run", index=index, attempt=0, trainer_epoch="a") for index in (0, 1)]
    for each in ids:
        trainer.ledger.admit(7)
        await trainer.images.put(each.scope, b"image")
        await bus.publish(bus.groups, b"group", message_id=each.message)
    async with consuming(bus, bus.groups, "trainer", ack_wait_s=60.0, max_ack_pending=10) as consumer:
        deliveries: list[Delivery] = []
        async with asyncio.timeout(HANG_S):
            while len(deliveries) < 2:
                deliveries += await consumer.fetch(2)
        if outcome == "failed":
            trainer.ledger.fail(0, 0)
        else:
            trainer.ledger.filter_out(0, 0, reason="zero_variance", num_tokens=1)
        group: Any = None
        trainer.ledger.hold(Arrival(index=1, attempt=0, oldest_version=7, newest_version=7, num_tokens=1, group=group))
        for index, delivery in enumerate(deliveries):
            trainer.ledger.keep_receipt(index, delivery)
        await trainer.save()
        assert consumer.num_in_hand == 1
    stored = await bus.jetstream.stream_info(bus.groups.name)
    assert (stored.state.messages, stored.state.first_seq) == (1, 2), "only the message of group 1"
    assert trainer.ledger.status(0) is GroupStatus.SETTLED
    images, sha256 = ImageStore(bus), hash_of(b"image")
    assert await images.get(ids[1].scope, sha256) == b"image"
    with pytest.raises(MissingImageError):
        await ImageStore(bus).get(ids[0].scope, sha256)


async def test_the_origin_of_a_version_is_kept_for_a_bounded_time(bus: Bus) -> None:
    """One key for each of the last thousand versions, however long the run."""
    versions = await open_versions(bus)
    for number in (1, 2, 1000, 1001):
        await versions.announce(PublishedVersion(policy_version=number, step=number))
    async with watched(await bus.bucket("policy")) as watch:
        assert sorted(watch.values) == ["current", "version.0", "version.1", "version.2"]
    assert (await open_versions(bus)).published == PublishedVersion(policy_version=1001, step=1001)


async def test_missing_checkpoints_do_not_begin_a_new_run(bus: Bus, tmp_path: Path) -> None:
    """The bus still holds the groups of the run: a volume that is not mounted must not purge them, nor a run folder
    that was moved without its checkpoints. A new folder begins a new run.
    """
    was_at, is_at, new = (tmp_path / name for name in ("was-at", "is-at", "new"))
    trainer = await open_controller(bus, was_at, epoch="a", pushes=Pushes())
    await trainer.publish(8)
    assert (await find_starting_point(settings_of(was_at), bus)).step == 0, "nothing was saved yet"
    await trainer.save()
    shutil.rmtree(was_at / "checkpoints")
    missing = f"holds no checkpoint, but run 'run' saved one of step 7 in {was_at}/checkpoints; restore or mount"
    with pytest.raises(SetupError, match=f"{was_at}/checkpoints {missing}"):
        await find_starting_point(settings_of(was_at), bus)
    is_at.mkdir()
    MetricsLog(is_at, last_step=0).write({"step": 1})
    with pytest.raises(SetupError, match=f"{is_at}/checkpoints {missing}"):
        await find_starting_point(settings_of(is_at), bus)
    assert (await find_starting_point(settings_of(new), bus)).checkpoint is None


async def test_as_many_groups_as_come_before_a_checkpoint_can_be_in_hand(bus: Bus) -> None:
    """Each keeps its message until then: a bound would end deliveries, and with them steps and checkpoints."""
    async with AsyncExitStack() as stack:
        await _open_groups(bus, stack, fresh_run=True)
        info = await bus.jetstream.consumer_info(bus.groups.name, "trainer")
    assert info.config.max_ack_pending == -1


async def test_a_group_that_is_lost_on_its_way_comes_again_within_a_minute(bus: Bus) -> None:
    """Not earlier: a group of 32 MiB takes a slow link some time, and is not in hand before it has come."""
    async with AsyncExitStack() as stack:
        await _open_groups(bus, stack, fresh_run=True)
        info = await bus.jetstream.consumer_info(bus.groups.name, "trainer")
    assert info.config.ack_wait == 60.0


@pytest.mark.parametrize(("num_steps", "words"), [(6, "newest checkpoint is of step 7; give at least that"), (7, "")])
async def test_a_run_has_no_fewer_steps_than_its_checkpoint(
    bus: Bus, tmp_path: Path, num_steps: int, words: str
) -> None:
    """It would wait for groups that nobody admits; a run that is at its end is no mistake."""
    trainer = await open_controller(bus, tmp_path, epoch="a", pushes=Pushes())
    await trainer.save()
    finding = find_starting_point(settings_of(tmp_path, num_steps=num_steps), bus)
    if words:
        with pytest.raises(ConfigError, match=words):
            await finding
    else:
        assert (await finding).step == 7
    assert Position(num_steps=num_steps, step=7, version=7).num_steps_left == 0
