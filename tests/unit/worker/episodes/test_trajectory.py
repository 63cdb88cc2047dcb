"""What an episode leaves behind, and which answers of an engine are refused."""

from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.records import VersionSpan
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.worker.episodes.trajectory import STOP, Trajectory


def response(**changes: Any) -> generate_pb2.GenerateResponse:
    """Three tokens, two of version 4 and one of version 5, with `changes`."""
    fields: dict[str, Any] = {
        "output_ids": [10, 11, 12],
        "logprobs": [-0.5, -1.0, -1.5],
        "version_spans": [
            common_pb2.VersionSpan(num_tokens=2, policy_version=4),
            common_pb2.VersionSpan(num_tokens=1, policy_version=5),
        ],
        "finish_reason": STOP,
        "usage": generate_pb2.Usage(num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=3),
        "replica_id": "engine-a",
    }
    return generate_pb2.GenerateResponse(**(fields | changes))


def test_only_the_policys_own_tokens_carry_mask_logprobs_and_versions() -> None:
    """Prompt, turn, observation, turn: spans of the same version are joined across the observation."""
    trajectory = Trajectory(min_version=4, forbidden_ids=())
    trajectory.add_observation([1, 2])
    trajectory.add_turn(response())
    trajectory.add_observation([3])
    trajectory.add_turn(
        response(
            output_ids=[20, 21],
            logprobs=[-2.0, -2.5],
            version_spans=[common_pb2.VersionSpan(num_tokens=2, policy_version=5)],
            usage=generate_pb2.Usage(num_prompt_tokens=13, num_cached_tokens=12, num_output_tokens=2),
        )
    )
    [sequence] = trajectory.to_sequences()
    token_ids, loss_mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    assert token_ids.tolist() == [1, 2, 10, 11, 12, 3, 20, 21]
    assert loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, -1.5, 0.0, -2.0, -2.5]
    assert [array.dtype for array in (token_ids, loss_mask, logprobs)] == [np.int32, np.bool_, np.float32]
    assert sequence.version_spans == (
        VersionSpan(num_tokens=2, policy_version=4),
        VersionSpan(num_tokens=3, policy_version=5),
    )
    assert [(turn.num_prompt_tokens, turn.num_cached_tokens) for turn in trajectory.turns] == [(9, 4), (13, 12)]
    assert (sequence.num_prompt_tokens, sequence.num_last_turn_tokens, trajectory.num_context_tokens) == (13, 2, 15)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_ids": [], "logprobs": [], "version_spans": []}, "no token"),
        ({"logprobs": [-0.5]}, "1 logprobs for 3 tokens"),
        ({"logprobs": [-0.5, float("-inf"), -1.0]}, "not finite"),
        ({"version_spans": [common_pb2.VersionSpan(num_tokens=2, policy_version=5)]}, r"\[2\] tokens for 3"),
        ({"version_spans": []}, r"\[\] tokens for 3"),
        ({"output_ids": [10, 366, 12]}, r"ids \[366\] may never be sampled"),
        ({"version_spans": [common_pb2.VersionSpan(num_tokens=3, policy_version=3)]}, "version 3, but at least 4"),
        ({"finish_reason": generate_pb2.FINISH_REASON_UNSPECIFIED}, "finish reason"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Nothing of it is kept, and the message names the replica and the fault."""
    trajectory = Trajectory(min_version=4, forbidden_ids=(366, 367))
    with pytest.raises(PenstockError, match=f"replica engine-a .*{reason}"):
        trajectory.add_turn(response(**changes))
    assert trajectory.token_ids == []
    assert trajectory.turns == ()
