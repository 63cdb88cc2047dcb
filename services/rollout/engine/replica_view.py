"""Describes this engine to others, in its lease and in GetReplica."""

import uuid

from penstock.v1 import common_pb2
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang.engine import Load, SglangEngine
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver


class ReplicaView:
    """This engine as others see it."""

    def __init__(self, config: RolloutConfig, engine: SglangEngine, receiver: WeightReceiver) -> None:
        """View `engine` and `receiver`; the view is complete once `listens` was called."""
        self.replica_id = f"engine-{uuid.uuid4().hex[:12]}"
        self.address = ""
        self._disaggregation: common_pb2.Disaggregation | None = None
        self.draining = False
        self._config = config
        self._engine = engine
        self._receiver = receiver
        self._load = Load(num_running=0, num_queued=0, kv_use=0.0)

    def listens(self, host: str, port: int) -> None:
        """Note that the server listens; `host` is this machine's address for others."""
        self.address = f"{host}:{port}"
        self._disaggregation = disaggregation.describe(
            self._config, host=host, bootstrap_port=self._engine.bootstrap_port
        )

    async def refresh(self) -> None:
        """Read the engine's load."""
        self._load = await self._engine.load()

    @property
    def state(self) -> common_pb2.ReplicaState.ValueType:
        """The engine's current state."""
        return common_pb2.REPLICA_STATE_DRAINING if self.draining else self._receiver.state

    def describe(self) -> common_pb2.Replica:
        """Return a description of the replica at this moment."""
        num_running = self._load.num_running
        if self._engine.is_disaggregated:
            # SGLang counts requests whose KV is in transfer as waiting, but they are being worked on.
            num_running = min(self._engine.num_in_flight, self._config.max_running)
        return common_pb2.Replica(
            replica_id=self.replica_id,
            address=self.address,
            role=disaggregation.ROLES[self._config.role],
            state=self.state,
            policy_version=self._receiver.version,
            num_running=num_running,
            num_queued=max(0, self._engine.num_in_flight - num_running),
            max_running=self._config.max_running,
            kv_use=self._load.kv_use,
            disaggregation=self._disaggregation,
            max_tokens=self._engine.checker.max_tokens,
            num_ranks=self._config.tensor_parallel,
        )
