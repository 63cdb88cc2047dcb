"""Client of RouterService: lists the router's replicas and drains one."""

from penstock.clients.base import Client
from penstock.rpc.channel import call
from penstock.runtime.security import Security
from penstock.v1 import router_pb2, router_pb2_grpc


class RouterClient(Client):
    """Lists the replicas that a router sees, and drains one."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def list_replicas(self, *, timeout_s: float = 5.0) -> router_pb2.ListReplicasResponse:
        """Return the pool, and the versions that bound it."""
        pending = self._stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=timeout_s)
        return await call(pending, peer=f"router at {self.address}")

    async def drain_replica(
        self, replica_id: str, *, grace_s: float, timeout_s: float
    ) -> router_pb2.RouterServiceDrainReplicaResponse:
        """Stop new calls to the replica, and wait until none runs there.

        Args:
            replica_id: The replica.
            grace_s: Seconds that running requests may take to finish before other replicas take them over.
            timeout_s: Deadline of the call; more than `grace_s`.

        Raises:
            InvalidRequestError: no such replica holds a lease.
            UnavailableError: the router or the replica does not answer.
        """
        request = router_pb2.RouterServiceDrainReplicaRequest(replica_id=replica_id, grace_s=grace_s)
        pending = self._stub.DrainReplica(request, timeout=timeout_s)
        return await call(pending, peer=f"router at {self.address}")
