"""The run's progress, and the gRPC service that reports it."""

from dataclasses import dataclass

import grpc.aio

from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.admission.group_state import GroupCounts


@dataclass(slots=True, kw_only=True)
class Progress:
    """The run's progress. The training loop writes it; callers of TrainerService read it."""

    run_id: str
    num_steps: int
    phase: trainer_pb2.RunPhase.ValueType = trainer_pb2.RUN_PHASE_STARTING
    evaluated_at: float = 0.0
    """Time of `time.monotonic()` until which an evaluation last held up steps."""
    step: int = 0
    policy_version: int = 0
    checkpoint_step: int = 0
    num_outstanding_groups: int = 0
    num_trained_groups: int = 0
    num_stale_groups: int = 0
    num_failed_groups: int = 0
    num_filtered_groups: int = 0

    def count_groups(self, counts: GroupCounts, *, num_untrained: int) -> None:
        """Copy the ledger's counts."""
        self.num_outstanding_groups = num_untrained
        self.num_trained_groups = counts.trained
        self.num_stale_groups = counts.rejected
        self.num_failed_groups = counts.failed
        self.num_filtered_groups = counts.filtered


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers calls from `Progress`."""

    def __init__(self, progress: Progress) -> None:
        """Report `progress`."""
        self._progress = progress

    async def GetRun(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.GetRunRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> trainer_pb2.GetRunResponse:
        """Report the run's progress."""
        progress = self._progress
        return trainer_pb2.GetRunResponse(
            run_id=progress.run_id,
            phase=progress.phase,
            step=progress.step,
            num_steps=progress.num_steps,
            policy_version=progress.policy_version,
            num_outstanding_groups=progress.num_outstanding_groups,
            checkpoint_step=progress.checkpoint_step,
            num_trained_groups=progress.num_trained_groups,
            num_stale_groups=progress.num_stale_groups,
            num_failed_groups=progress.num_failed_groups,
            num_filtered_groups=progress.num_filtered_groups,
        )
