"""Interface of transports: either each member pulls the weights, or all meet in one collective operation.

Members that pull go through a push alone (`rolling_push.py`), the others together (`collective_push.py`).
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.v1 import rollout_pb2
from services.trainer.weight_sync.push_calls import Member, Stub
from services.trainer.weight_sync.snapshot import WeightSnapshot


class Transport(ABC):
    """Carries the weights of one push to its members."""

    name: ClassVar[str]
    """Its name in `trainer.weight_sync.transport`."""

    @abstractmethod
    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Set the source in `request`, which tells this member how to get the weights."""


class PullTransport(Transport):
    """Each member fetches the weights on its own, and none waits for another."""

    @abstractmethod
    def name_source(self, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Set the source in `request`; it is the same for all members."""

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Set the source."""
        self.name_source(request)


class UploadTransport(PullTransport):
    """Each member is sent the weights before it loads them."""

    @abstractmethod
    async def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> None:
        """Send a prepared member the bytes that it loads later, while it still generates."""


class CollectiveTransport(Transport):
    """Trainer and members wait for each other. Methods block; a closed transport cannot be used again."""

    @property
    @abstractmethod
    def is_formed(self) -> bool:
        """Whether the members are already connected. If not, `form` runs while they prepare."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    @abstractmethod
    def form(self, *, timeout_s: float) -> None:
        """Do the trainer's part while members prepare."""

    @abstractmethod
    def send(self, weights: WeightSnapshot, *, timeout_s: float) -> None:
        """Do the trainer's part while members receive."""

    @abstractmethod
    def close(self, *, are_coming: bool = False) -> None:
        """Release every member that waits in it; see `WeightProcessGroup.close`."""
