"""The one form in which tasks, turns and results travel to hosted environments."""

import json
import math
from typing import Any

import numpy as np
import pytest

from penstock.environments import AssistantTurn, Observation, StepResult
from penstock.errors import EnvironmentFailedError, InvalidRequestError
from penstock.records import ImagePart, Message, TextPart, ToolCall
from services.rollout.worker.environments.hosting import messages


def test_an_observation_comes_back_as_it_was() -> None:
    """Messages, images of any bytes, and tools; images are base64 on the way."""
    observation = Observation(
        messages=(Message(role="tool", parts=(ImagePart(index=0), TextPart(text="größer ☃"))),),
        images=(bytes(range(256)),),
        tools=({"type": "function"},),
    )
    reply = messages.ObservationReply(number=3, observation=messages.from_observation(observation))
    data = messages.encode(reply)
    assert json.loads(data)["observation"]["images"][0].startswith("AAECAw")
    back = messages.decode_reply(data)
    assert isinstance(back, messages.ObservationReply)
    assert messages.to_observation(back.observation) == observation


def test_a_result_comes_back_as_it_was() -> None:
    """Numbers of numpy, which JSON does not know, are numbers."""
    result = StepResult(observation=None, truncated=True, reward=np.float32(0.5), metrics={"n": np.int64(3)})
    back = messages.decode_reply(messages.encode(messages.from_result(result, number=1)))
    assert isinstance(back, messages.ResultReply)
    assert messages.to_result(back) == StepResult(observation=None, truncated=True, reward=0.5, metrics={"n": 3.0})


@pytest.mark.parametrize("value", ["\ud800", [[]]])
def test_a_call_that_json_cannot_carry_is_a_malformed_one(value: Any) -> None:
    """The policy may say anything; the turn still reaches the environment."""
    for _ in range(3000 if isinstance(value, list) else 0):
        value = [value]
    turn = AssistantTurn(
        text="said",
        calls=(ToolCall(name="zoom", arguments={"box": value}), ToolCall(name="look", arguments={"at": 1})),
        malformed_calls=("{",),
    )
    back = messages.decode_request(messages.encode(messages.to_step(turn, number=1, remaining_s=None)))
    assert isinstance(back, messages.StepRequest)
    assert [call.name for call in back.turn.calls] == ["look"]
    assert back.turn.malformed_calls == ("{", "zoom: arguments that cannot be sent as JSON")


def test_an_observations_bounds_hold_on_both_sides() -> None:
    """What the sender did not check is refused by the receiver, with the size found and the bound."""
    picture = Message(role="user", parts=(ImagePart(index=0),))
    large = Observation(messages=(picture,), images=(bytes(messages.MAX_IMAGES_BYTES + 1),))
    with pytest.raises(messages.ObservationTooLargeError, match="33554433 bytes; at most 33554432"):
        messages.from_observation(large)
    with pytest.raises(messages.ObservationTooLargeError, match="33554433 bytes; at most 33554432"):
        messages.to_observation(messages.ObservationMessage(messages=large.messages, images=large.images))
    text = Message(role="user", parts=(TextPart(text="x" * (messages.MAX_TEXT_CHARS // 2 + 1)),))
    with pytest.raises(messages.ObservationTooLargeError, match="2097154 characters; at most 2097152"):
        messages.from_observation(Observation(messages=(text, text)))
    messages.from_observation(Observation(messages=(text,)))


def test_a_message_beyond_all_bounds_is_not_sent() -> None:
    """Whatever makes it large."""
    tool = {"description": "x" * messages.MAX_MESSAGE_BYTES}
    observation = messages.ObservationMessage(messages=(), tools=(tool,))
    with pytest.raises(EnvironmentFailedError, match=r"a message of 5033.* bytes; at most 50331648"):
        messages.encode(messages.ObservationReply(number=0, observation=observation))


def test_a_result_that_contradicts_itself_is_refused() -> None:
    """As it would be where it was made."""
    with pytest.raises(EnvironmentFailedError, match=r"refer to images \[0\], but the observation brings 0"):
        messages.to_observation(
            messages.ObservationMessage(messages=(Message(role="user", parts=(ImagePart(index=0),)),))
        )
    with pytest.raises(EnvironmentFailedError, match="reward = inf must be a finite number"):
        messages.to_result(messages.ResultReply(number=0, observation=None, reward=math.inf))


def test_a_failure_says_that_an_observation_was_too_large() -> None:
    """Other failures are the same bytes as before there was a difference."""
    assert json.loads(messages.encode(messages.failed(1, "a"))) == {"kind": "failed", "number": 1, "error": "a"}
    back = messages.decode_reply(messages.encode(messages.failed(1, "a", is_too_large=True)))
    assert isinstance(back, messages.FailedReply)
    assert back.is_too_large


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("a"), InvalidRequestError),
        (OSError("a"), messages.EnvironmentUnavailableError),
        (messages.EnvironmentUnavailableError("a"), messages.EnvironmentUnavailableError),
        (KeyError("a"), EnvironmentFailedError),
    ],
)
def test_what_a_reset_raised_keeps_its_meaning(error: Exception, kind: type[Exception]) -> None:
    """On the way from the environment to its episode."""
    back = messages.decode_reply(messages.encode(messages.reset_failed(1, error, "a")))
    assert isinstance(back, messages.FailedReply)
    assert type(messages.error_of(back)) is kind


def test_a_long_error_keeps_its_ends() -> None:
    """The kind of error stands at the start, and what a traceback ends with at the end."""
    reply = messages.failed(1, "start" + "x" * 10_000 + "\ud800end")
    assert len(reply.error) < 4100
    assert reply.error.startswith("start")
    assert reply.error.endswith("?end")
