"""An evaluation's claim on some replicas: they take no pushes, and play nothing else, until it is released."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
import torch

from penstock.v1 import common_pb2
from penstock.weights.digest import digest_kind
from penstock.weights.shared_memory import SharedMemoryPool
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.held_out.choice import can_spare, choose_held_out, num_slots
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights
from services.trainer.weight_sync.held_out.record import HeldOutRecord
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transport_selector import TransportSelector
from services.trainer.weight_sync.transports.disk import WeightFileStore

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class HoldOut:
    """The replicas that are held out, and their version. It is written for routers before a replica is held out."""

    step: int
    """Optimizer steps taken to reach the version."""
    kept: KeptWeights
    """The version's weights, for a replica that takes the place of one that died."""
    num: int
    """Number of replicas to hold out, at least 1."""
    record: HeldOutRecord
    """The record that routers read."""
    replica_ids: frozenset[str] = frozenset()
    num_slots: int = 0
    """Samples that the replicas generate at once."""
    _spares: bool = True
    """Whether training had replicas left at the last update."""
    _has_some: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def version(self) -> int:
        """The policy version of the held-out replicas."""
        return self.kept.version

    async def begin(self, replicas: Sequence[common_pb2.Replica]) -> bool:
        """Hold out some of `replicas`, if training has others left; return whether it does."""
        chosen = self._chosen(replicas)
        if not can_spare(replicas, chosen):
            return False
        await self._hold(chosen)
        return True

    async def update(self, replicas: Sequence[common_pb2.Replica]) -> list[common_pb2.Replica]:
        """Replace held-out replicas that are no longer among `replicas`; return all that are held out.

        The first call claims the initial `replica_ids`, which an earlier trainer held out.
        """
        chosen = self._chosen(replicas)
        is_claimed = self._has_some.is_set() or not chosen
        if not is_claimed or self.replica_ids != {each.replica_id for each in chosen}:
            await self._hold(chosen)
        spares = can_spare(replicas, chosen)
        if self._spares and chosen and not spares:
            log.warning(
                "evaluation.pauses_training",
                step=self.step,
                reason="no other replica is left",
                effect="training waits for one, or until the evaluation has ended",
            )
        self._spares = spares or not chosen
        return chosen

    async def until_some(self) -> None:
        """Wait until a replica is held out."""
        await self._has_some.wait()

    async def open_weights(
        self, config: WeightSyncConfig, *, host: str, backend: str, keeps_on_host: bool, max_bucket_bytes: int
    ) -> tuple[WeightSnapshot, TransportSelector]:
        """Read the kept weights, and return them with their own transports; replicas that see the files read them.

        Raises:
            SetupError: the files can no longer be read.
        """
        on_gpu = backend == "nccl"
        computing = torch.device("cuda" if on_gpu else "cpu")
        weights = await asyncio.to_thread(
            self.kept.load,
            device=torch.device("cpu") if keeps_on_host else computing,
            kind=digest_kind(computing),
            max_bucket_bytes=max_bucket_bytes,
            pool=SharedMemoryPool() if config.shares_memory(on_gpu=on_gpu) else None,
        )
        files = WeightFileStore.of(self.version, self.kept.folder)
        return weights, TransportSelector(config, files, host=host, backend=backend, chunk_bytes=max_bucket_bytes)

    def _chosen(self, replicas: Sequence[common_pb2.Replica]) -> list[common_pb2.Replica]:
        return choose_held_out(replicas, self.replica_ids, num=self.num, version=self.version)

    async def _hold(self, chosen: Sequence[common_pb2.Replica]) -> None:
        ids = frozenset(each.replica_id for each in chosen)
        await self.record.write(ids, version=self.version, step=self.step)
        self.replica_ids, self.num_slots = ids, num_slots(chosen)
        log.info("evaluation.replicas_held_out", step=self.step, version=self.version, replica_ids=sorted(ids))
        if ids:
            self._has_some.set()
        else:
            self._has_some.clear()
