"""Client of TrainerService: the progress of a run."""

from penstock.clients.base import Client
from penstock.rpc.channel import call
from penstock.runtime.security import Security
from penstock.v1 import trainer_pb2, trainer_pb2_grpc


class TrainerClient(Client):
    """A client of the trainer."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the trainer at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def get_run(self, *, timeout_s: float = 5.0) -> trainer_pb2.GetRunResponse:
        """Return the run's progress."""
        pending = self._stub.GetRun(trainer_pb2.GetRunRequest(), timeout=timeout_s)
        return await call(pending, peer=f"trainer at {self.address}")
