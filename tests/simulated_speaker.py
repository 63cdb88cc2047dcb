"""A simulated engine that says what it is told, for tests of text."""

from collections.abc import Sequence

from penstock.bus.connection import Bus
from penstock.v1 import common_pb2, generate_pb2
from tests.simulated_engine import SimulatedEngine


class SimulatedSpeaker(SimulatedEngine):
    """Answers every prompt with the ids of `says`, the last of which ends the answer, and goes on where a prompt ends
    with the first of them; the n-th id has the logprob -n/64."""

    def __init__(self, bus: Bus, *, says: Sequence[int] = (), **engine) -> None:
        super().__init__(bus, **engine)
        self.says = says

    def _answer(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        prompt, says = list(request.input_ids), list(self.says)
        done = next((count for count in range(len(says) - 1, 0, -1) if prompt[-count:] == says[:count]), 0)
        ids = says[done:][: request.sampling.max_new_tokens]
        is_whole = done + len(ids) == len(says)
        return generate_pb2.GenerateResponse(
            output_ids=ids,
            logprobs=[-(done + place + 1) / 64 for place in range(len(ids))],
            version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=self.replica.policy_version)],
            finish_reason=generate_pb2.FINISH_REASON_STOP if is_whole else generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=len(prompt), num_cached_tokens=1, num_output_tokens=len(ids)),
            replica_id=self.replica_id,
        )
