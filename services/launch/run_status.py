"""Asks the trainer for the state of the run: TrainerService.GetRun."""

from penstock.clients import TrainerClient
from penstock.errors import PenstockError
from penstock.runtime.security import Security
from penstock.v1 import trainer_pb2

_TIMEOUT_S = 2.0


async def fetch_run(address: str, security: Security) -> trainer_pb2.GetRunResponse | None:
    """Return the trainer's answer; None while it does not answer. `security` has the tokens for it."""
    async with TrainerClient(address, security=security) as client:
        try:
            return await client.get_run(timeout_s=_TIMEOUT_S)
        except PenstockError:
            return None


def describe_phase(run: trainer_pb2.GetRunResponse) -> str:
    """Describe what the trainer is doing, for a person who waits for it to end."""
    match run.phase:
        case trainer_pb2.RUN_PHASE_STARTING:
            return "loading the model"
        case trainer_pb2.RUN_PHASE_TRAINING:
            return f"computing step {run.step + 1} of {run.num_steps}"
        case trainer_pb2.RUN_PHASE_PUSHING:
            return "pushing weights to the engines"
        case trainer_pb2.RUN_PHASE_SAVING:
            return f"writing the checkpoint of step {run.step}"
        case trainer_pb2.RUN_PHASE_EVALUATING:
            return f"ending the evaluation of step {run.step}"
        case _:
            return "ending the step"
