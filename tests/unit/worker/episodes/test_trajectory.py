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
        ({"finish_reason": 77}, "finish reason 77"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Nothing of it is kept, and the message names the replica and the fault."""
    trajectory = Trajectory(min_version=4, forbidden_ids=(366, 367))
    with pytest.raises(PenstockError, match=f"replica engine-a .*{reason}"):
        trajectory.add_turn(response(**changes))
    assert trajectory.token_ids == []
    assert trajectory.turns == ()


def experts(first: int, count: int, **changes: Any) -> generate_pb2.RoutedExperts:
    """Of `count` tokens in 2 layers of 3 experts each, numbered by place."""
    fields: dict[str, Any] = {
        "first_token": first,
        "num_layers": 2,
        "num_experts_per_token": 3,
        "id_size_bytes": 1,
        "expert_ids": bytes(6 * place + offset for place in range(first, first + count) for offset in range(6)),
    }
    return generate_pb2.RoutedExperts(**(fields | changes))


def test_experts_of_all_turns_are_those_of_the_tokens_that_engines_computed() -> None:
    """A turn that reports none is made up for by the next, which is asked from where they are known; images count."""
    trajectory = Trajectory(min_version=4)
    trajectory.add_observation([1, 2])  # nine tokens in the engine
    assert trajectory.num_routed_tokens == 0
    trajectory.add_turn(response(routed_experts=experts(0, 11)))
    assert trajectory.num_routed_tokens == 11
    trajectory.add_observation([3])
    trajectory.add_turn(response(usage=generate_pb2.Usage(num_prompt_tokens=13)))
    assert trajectory.num_routed_tokens == 11
    trajectory.add_observation([4])
    trajectory.add_turn(response(usage=generate_pb2.Usage(num_prompt_tokens=17), routed_experts=experts(11, 8)))
    [sequence] = trajectory.to_sequences()
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.dtype == np.uint8
    assert sequence.routed_experts.tolist() == np.arange(19 * 6).reshape(19, 2, 3).tolist()


def test_experts_of_ids_left_out_stay_with_the_sequence_that_has_them() -> None:
    """What is copied is computed again, at other places."""
    trajectory = Trajectory(min_version=4)
    trajectory.add_observation([1, 2])
    trajectory.add_turn(response(routed_experts=experts(0, 11)))
    trajectory.leave_out([1, 2, 12])
    assert trajectory.num_routed_tokens == 0
    trajectory.add_observation([3])
    trajectory.add_turn(
        response(usage=generate_pb2.Usage(num_prompt_tokens=11), routed_experts=experts(0, 13, id_size_bytes=1))
    )
    found = [sequence.routed_experts for sequence in trajectory.to_sequences()]
    assert [None if each is None else len(each) for each in found] == [11, 13]


def test_more_than_256_experts_take_four_bytes_each() -> None:
    """Little-endian."""
    trajectory = Trajectory(min_version=4)
    trajectory.add_observation([1, 2])
    ids = np.full((11, 2, 3), 300, "<i4")
    trajectory.add_turn(response(routed_experts=experts(0, 11, id_size_bytes=4, expert_ids=ids.tobytes())))
    [sequence] = trajectory.to_sequences()
    assert sequence.routed_experts is not None
    assert (sequence.routed_experts == 300).all()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (experts(0, 10), "experts of 10 tokens from 0 on, where 11 were computed from 0 on"),
        (experts(1, 10), "experts of 10 tokens from 1 on, where 11 were computed from 0 on"),
        (experts(0, 11, id_size_bytes=2), "66 bytes of experts' ids, of 2 bytes each, for 3 experts in 2 layers"),
        (experts(0, 11, num_layers=0), "for 3 experts in 0 layers"),
        (experts(0, 11, num_experts_per_token=4), "66 bytes of experts' ids"),
    ],
)
def test_experts_of_other_tokens_are_refused(found: generate_pb2.RoutedExperts, reason: str) -> None:
    """And nothing of the answer is kept."""
    trajectory = Trajectory(min_version=4)
    trajectory.add_observation([1, 2])
    with pytest.raises(PenstockError, match=f"replica engine-a .*{reason}"):
        trajectory.add_turn(response(routed_experts=found))
    assert (trajectory.token_ids, trajectory.num_routed_tokens) == ([1, 2], 0)


def test_experts_of_another_model_in_a_later_turn_are_refused() -> None:
    """Two replicas with different models behind one router."""
    trajectory = Trajectory(min_version=4)
    trajectory.add_observation([1, 2])
    trajectory.add_turn(response(routed_experts=experts(0, 11)))
    changed = experts(11, 4, num_layers=3, num_experts_per_token=2)
    with pytest.raises(PenstockError, match=r"experts of shape \[3, 2\], but \[2, 3\] in earlier turns"):
        trajectory.add_turn(response(usage=generate_pb2.Usage(num_prompt_tokens=13), routed_experts=changed))
