"""The run's progress, and the gRPC service that reports it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from penstock.v1 import trainer_pb2, trainer_pb2_grpc


@dataclass(slots=True, kw_only=True)
class Progress:
    """The run's progress. The training loop writes it; TrainerService, checkpoints, metrics and pushes read it."""

    run_id: str
    num_steps: int
    phase: trainer_pb2.RunPhase.ValueType = trainer_pb2.RUN_PHASE_STARTING
    evaluated_at: float = 0.0
    """Time of `time.monotonic()` until which an evaluation last held up steps."""
    step: int = 0
    policy_version: int = 0
    checkpoint_step: int = 0

    @contextmanager
    def held_up(self, *, is_over: bool) -> Iterator[None]:
        """Report, during the context, that an evaluation holds up the next step or the end; not if it is over."""
        if is_over:
            yield
            return
        before, self.phase = self.phase, trainer_pb2.RUN_PHASE_EVALUATING
        try:
            yield
        finally:
            self.phase, self.evaluated_at = before, time.monotonic()


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers calls from `Progress`."""

    def __init__(self, progress: Progress) -> None:
        """Report `progress`."""
        self._progress = progress

    async def GetRun(  # noqa: N802 - gRPC's name
        self, request: trainer_pb2.GetRunRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> trainer_pb2.GetRunResponse:
        """Report what the trainer is doing and how far the run is."""
        progress = self._progress
        return trainer_pb2.GetRunResponse(phase=progress.phase, step=progress.step, num_steps=progress.num_steps)
