"""The trainer's own memory, which members on the same machine open and read."""

from dataclasses import dataclass

from penstock.v1 import rollout_pb2
from penstock.weights.shared_memory import SharedMemory
from services.trainer.weight_sync.transports.base import PullTransport


@dataclass(frozen=True)
class SharedMemoryTransport(PullTransport):
    """The memory of one snapshot, which it keeps alive."""

    name = "shared_memory"
    memory: SharedMemory

    def name_source(self, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Say how to open the memory."""
        request.shared_memory.CopyFrom(self.memory.message)
