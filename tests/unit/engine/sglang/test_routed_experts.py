"""The experts that SGLang reports become a message, or an error if they are not those of the turn's tokens."""

import base64

import numpy as np
import pytest

from penstock.model.families.experts import MixtureShape
from services.rollout.engine.sglang.routed_experts import message_of, read_ids

IDS = np.arange(24, dtype="<i4")
"""Of 4 tokens in 3 layers of 2 experts each."""


def shape(num_experts: int) -> MixtureShape:
    """Of a mixture with `num_experts` experts."""
    return MixtureShape(num_layers=3, num_experts=num_experts, num_experts_per_token=2)


@pytest.mark.parametrize(("num_experts", "size_bytes"), [(24, 1), (256, 1), (257, 4)])
def test_ids_take_one_byte_where_that_is_enough(num_experts: int, size_bytes: int) -> None:
    """Of the tokens from the first that was asked for to the one before the last."""
    ids = read_ids(base64.b64encode(IDS.tobytes()).decode())
    message = message_of(ids, shape(num_experts), first_token=5, num_tokens=10)
    assert (message.first_token, message.num_layers, message.num_experts_per_token) == (5, 3, 2)
    assert message.id_size_bytes == size_bytes
    assert np.frombuffer(message.expert_ids, dtype=f"<u{size_bytes}").tolist() == IDS.tolist()


def test_of_no_tokens_there_are_no_ids() -> None:
    """One token of output, asked for from the end of the prompt on."""
    assert message_of(read_ids(""), shape(24), first_token=9, num_tokens=10).expert_ids == b""


@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "reason"),
    [
        (24, 9, "24 ids of experts, from 0 to 23, where 3 tokens have 18 below 24"),
        (23, 10, "24 ids of experts, from 0 to 23, where 4 tokens have 24 below 23"),
    ],
)
def test_ids_of_other_tokens_or_another_model_are_an_error(num_experts: int, num_tokens: int, reason: str) -> None:
    """A trainer would replay them."""
    with pytest.raises(RuntimeError, match=reason):
        message_of(IDS, shape(num_experts), first_token=5, num_tokens=num_tokens)
