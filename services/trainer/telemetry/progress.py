"""Where the run stands, and the gRPC face that tells it."""

from dataclasses import dataclass

import grpc.aio

from penstock.v1 import trainer_pb2, trainer_pb2_grpc


@dataclass(slots=True, kw_only=True)
class Progress:
    """Written by the training loop, read by anyone who asks."""

    run_id: str
    num_steps: int
    phase: trainer_pb2.RunPhase.ValueType = trainer_pb2.RUN_PHASE_STARTING
    step: int = 0
    policy_version: int = 0
    checkpoint_step: int = 0
    num_outstanding_groups: int = 0
    num_trained_groups: int = 0
    num_stale_groups: int = 0
    num_failed_groups: int = 0


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers from `Progress`."""

    def __init__(self, progress: Progress) -> None:
        """Tell of `progress`."""
        self._progress = progress

    async def GetRun(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.GetRunRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> trainer_pb2.GetRunResponse:
        """Tell where the run stands."""
        now = self._progress
        return trainer_pb2.GetRunResponse(
            run_id=now.run_id,
            phase=now.phase,
            step=now.step,
            num_steps=now.num_steps,
            policy_version=now.policy_version,
            num_outstanding_groups=now.num_outstanding_groups,
            checkpoint_step=now.checkpoint_step,
            num_trained_groups=now.num_trained_groups,
            num_stale_groups=now.num_stale_groups,
            num_failed_groups=now.num_failed_groups,
        )
