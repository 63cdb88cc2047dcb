"""Policy version numbers: claimed before a push begins, announced when it has ended.

Invariants, over restarts and with concurrent trainers: no number ever stands for two sets of weights, and the announced
number never decreases.
"""

from pathlib import Path

from nats.js.kv import KeyValue

from penstock.bus.buckets.register import Register, open_register
from penstock.bus.buckets.replica_lease import read_replica
from penstock.bus.buckets.watch import Watch
from penstock.bus.connection import Bus
from penstock.errors import CorruptMessageError, SetupError, SupersededError
from penstock.records.published_version import (
    CURRENT_KEY,
    POLICY_BUCKET,
    read_published_version,
    write_published_version,
)
from penstock.v1.trainer_pb2 import PublishedVersion

_CLAIMED_KEY = "claimed"
_NUM_KEPT_VERSIONS = 1000
"""Number of versions whose origins are kept, for people who inspect a run."""


class PolicyVersions:
    """The versions of a run, in the bucket `policy`.

    claimed        the newest version whose push has begun; replaced only by compare-and-set
    current        the version announced last; replaced only by compare-and-set, and never by an earlier one
    version.<n>    the same for each of the last 1000 versions; n counts modulo 1000
    """

    def __init__(
        self, bus: Bus, bucket: KeyValue, claimed: Register, current: Register, published: PublishedVersion | None
    ) -> None:
        """Use `open_versions`."""
        self._bus = bus
        self._bucket = bucket
        self._claimed = claimed
        self._current = current
        self.published = published
        """The version announced last; None if none was announced."""

    @property
    def newest_published(self) -> int:
        """Number of the version announced last; 0 if none was announced."""
        return 0 if self.published is None else self.published.policy_version

    @property
    def newest_claimed(self) -> int:
        """Number of the newest claimed version that this process knows; 0 if there is none."""
        return _version_in(self._claimed)

    async def claim(self, version: PublishedVersion) -> None:
        """Claim a version number, before any replica holds its weights. `trainer_epoch` must be this process's.

        Raises:
            SupersededError: another trainer has claimed a version since this one read the bucket.
            SetupError: the server no longer has the bucket.
        """
        await self._claimed.write(write_published_version(version))

    async def announce(self, version: PublishedVersion) -> None:
        """Announce a claimed version to all processes of the run. `trainer_epoch` must be this process's.

        Raises:
            SupersededError: another trainer has announced this version or a later one since this one read the bucket.
            CorruptMessageError: the bucket holds something else.
            SetupError: the server no longer has the bucket.
        """
        value = write_published_version(version)
        is_anothers = False
        while True:
            newest = _version_in(self._current)
            if newest > version.policy_version or (is_anothers and newest == version.policy_version):
                raise SupersededError(
                    f"another trainer has announced policy version {newest}, so this one does not announce "
                    f"{version.policy_version}; see that the run has one trainer only"
                )
            try:
                await self._current.write(value)
                break
            except SupersededError:
                await self._current.read()
                is_anothers = True
        await self._bus.put(self._bucket, f"version.{version.policy_version % _NUM_KEPT_VERSIONS}", value)
        self.published = version

    def require_checkpoint(self, folder: Path, *, has_steps: bool) -> None:
        """Refuse to begin a new run, which empties the queues, where a run that saved checkpoints should go on.

        A new folder may begin one: each `penstock train` has its own, also on a NATS that has the name's earlier runs.

        Args:
            folder: The folder of checkpoints, which holds none.
            has_steps: Whether the run folder has steps: then a run should go on, even if the path was another one.

        Raises:
            SetupError: according to NATS, there should be a checkpoint.
        """
        if self.published is None or self.published.checkpoint_step == 0:
            return
        saved_in, own = self.published.checkpoint_folder, str(folder.absolute())
        if has_steps or saved_in == own:
            raise SetupError(
                f"{own} holds no checkpoint, but run {self.published.run_id!r} saved one of step "
                f"{self.published.checkpoint_step} in {saved_in}; restore or mount the checkpoints and start again, or "
                "give another run.name to begin a new run"
            )


async def open_versions(bus: Bus) -> PolicyVersions:
    """Read the bucket `policy`.

    Raises:
        SetupError: the server does not create the bucket, or the bucket holds something else.
    """
    bucket = await bus.bucket(POLICY_BUCKET)
    claimed = await open_register(bus, bucket, _CLAIMED_KEY)
    current = await open_register(bus, bucket, CURRENT_KEY)
    try:
        published = read_published_version(current.value) if current.value else None
    except CorruptMessageError as error:
        raise SetupError(f"bucket policy on NATS at {bus.config.url}: {error}; choose another run.name") from None
    return PolicyVersions(bus, bucket, claimed, current, published)


def _version_in(register: Register) -> int:
    return read_published_version(register.value).policy_version if register.value else 0


def first_version(*, checkpoint: int | None, published: int, claimed: int, newest_held: int, max_staleness: int) -> int:
    """Return the version under which a trainer publishes the weights that it starts with.

    After an orderly stop, the checkpoint holds the weights published last. They keep their number, and groups sampled
    from them stay as fresh as they were. Otherwise the number is far enough ahead that everything sampled before counts
    as stale, because it may come from weights that were lost with the steps after the checkpoint.

    Args:
        checkpoint: Version of the weights in the checkpoint; None for a new run.
        published: The version announced last.
        claimed: The last version whose push began.
        newest_held: The newest version that a living replica holds, because NATS may have lost the other two.
        max_staleness: The staleness bound.
    """
    last = max(published, claimed, newest_held, checkpoint or 0)
    if last == 0:
        return 1
    return last if checkpoint == published == last else last + 1 + max_staleness


def newest_version_held(replicas: Watch) -> int:
    """Return the newest version that a living replica holds; 0 if there is none."""
    living = (read_replica(key, value) for key, value in replicas.values.items())
    return max((replica.policy_version for replica in living if replica is not None), default=0)
