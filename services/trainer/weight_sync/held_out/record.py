"""The record of the held-out replicas, for routers: a key of the bucket `policy`.

Invariant: only the trainer that read the key last replaces it, so a replaced trainer holds nothing out.
"""

from collections.abc import Collection

import structlog

from penstock.bus.buckets.register import Register, open_register
from penstock.bus.connection import Bus
from penstock.errors import CorruptMessageError
from penstock.records.held_out_replicas import HELD_OUT_KEY, read_held_out_replicas, write_held_out_replicas
from penstock.records.published_version import POLICY_BUCKET
from penstock.v1.trainer_pb2 import HeldOutReplicas

log = structlog.get_logger()


class HeldOutRecord:
    """The key, as this trainer last read or wrote it."""

    def __init__(self, register: Register, *, trainer_epoch: str) -> None:
        """Use `open_held_out_record`."""
        self._register = register
        self._trainer_epoch = trainer_epoch

    @property
    def value(self) -> HeldOutReplicas:
        """The held-out replicas; none if the key cannot be read."""
        if not self._register.value:
            return HeldOutReplicas()
        try:
            return read_held_out_replicas(self._register.value)
        except CorruptMessageError as error:
            log.warning("held_out.unreadable", error=str(error))
            return HeldOutReplicas()

    async def write(self, replica_ids: Collection[str], *, version: int, step: int) -> None:
        """Make routers send these replicas the calls of the evaluation of `version`, and no others.

        Raises:
            SupersededError: another trainer has written it since.
            SetupError: the server no longer has the bucket.
        """
        held_out = HeldOutReplicas(
            replica_ids=sorted(replica_ids), policy_version=version, step=step, trainer_epoch=self._trainer_epoch
        )
        await self._register.write(write_held_out_replicas(held_out))

    async def clear(self) -> None:
        """Make routers treat all replicas alike.

        Raises:
            SupersededError: another trainer has written it since.
            SetupError: the server no longer has the bucket.
        """
        await self.write((), version=0, step=0)


async def open_held_out_record(bus: Bus, *, trainer_epoch: str) -> HeldOutRecord:
    """Read the key.

    Raises:
        SetupError: the server does not create the bucket.
    """
    bucket = await bus.bucket(POLICY_BUCKET)
    return HeldOutRecord(await open_register(bus, bucket, HELD_OUT_KEY), trainer_epoch=trainer_epoch)
