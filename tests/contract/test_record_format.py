"""Names and forms of records are promises to messages that outlive an upgrade."""

import hashlib

import msgpack
import msgspec
import numpy as np
import pytest

from penstock.errors import CorruptMessageError
from penstock.records import Group, Message, Record, SessionCall, SessionId, SessionState, TextPart, ToolCall
from penstock.records.codec import decode, encode
from tests.contract.golden_records import (
    CALL,
    CALL_WIRE,
    GROUP,
    GROUP_WIRE,
    PROMPT,
    PROMPT_WIRE,
    SESSION_CALL,
    SESSION_CALL_WIRE,
    SESSION_FAILURE,
    SESSION_FAILURE_WIRE,
    SESSION_STATE,
    SESSION_STATE_WIRE,
)

GOLDEN: dict[str, tuple[Record, str]] = {
    "prompt": (PROMPT, PROMPT_WIRE),
    "group": (GROUP, GROUP_WIRE),
    "call": (CALL, CALL_WIRE),
    "session-state": (SESSION_STATE, SESSION_STATE_WIRE),
    "session-call": (SESSION_CALL, SESSION_CALL_WIRE),
    "session-failure": (SESSION_FAILURE, SESSION_FAILURE_WIRE),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_records_on_the_bus_are_still_read(name: str) -> None:
    """What an earlier release stored decodes to the same record, and is stored the same way today."""
    record, wire = GOLDEN[name]
    assert encode(record).hex() == wire
    assert encode(decode(bytes.fromhex(wire), type(record))).hex() == wire


CALLING = Message(
    role="assistant", parts=(TextPart(text="I look."),), tool_calls=(ToolCall(name="zoom", arguments={"factor": 2}),)
)
CALLING_WIRE = (
    "83a4726f6c65a9617373697374616e74a570617274739182a474797065a474657874a474657874a749206c6f6f6b2eaa746f6f6c5f63616c"
    "6c739182a46e616d65a47a6f6f6da9617267756d656e747381a6666163746f7202"
)


def test_a_message_without_calls_is_stored_as_before_there_were_any() -> None:
    """So that prompts of neighbouring releases are the same bytes; a message that calls has one field more."""
    assert encode(CALLING).hex() == CALLING_WIRE
    assert decode(bytes.fromhex(CALLING_WIRE), Message) == CALLING
    assert set(msgpack.unpackb(encode(PROMPT.messages[0]))) == {"role", "parts"}
    assert decode(msgpack.packb({"role": "user", "parts": [], "later": 1}), Message).tool_calls == ()
    with pytest.raises(CorruptMessageError, match="role user has tool_calls"):
        decode(bytes.fromhex(CALLING_WIRE.replace("a9617373697374616e74", "a475736572")), Message)


@pytest.mark.parametrize("name", GOLDEN)
def test_records_are_plain_msgpack(name: str) -> None:
    """The `msgpack` package reads each field under its name; an array is its type, its shape and its bytes."""
    record, _ = GOLDEN[name]
    wire = msgpack.unpackb(encode(record))
    assert wire["record_version"] == 2
    assert set(wire) == set(record.__struct_fields__)
    if isinstance(record, Group):
        [sequence] = wire["samples"][0]["sequences"]
        dtype, shape, data = sequence["logprobs"]
        assert np.frombuffer(data, dtype).reshape(shape).tolist() == [0, -0.5, -1.25]
        assert sequence["version_spans"] == [[2, 3]]
    if isinstance(record, SessionCall):
        dtype, shape, data = wire["output_ids"]
        assert np.frombuffer(data, dtype).reshape(shape).tolist() == [6, 7]
        assert (wire["continues"], wire["version_spans"]) == (5, [[2, 3]])
    if isinstance(record, SessionState):
        assert (wire["nonce"], wire["is_closed"], wire["timeout_s"]) == ("0f", True, 1.5)
        assert wire["sampling"] == {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_new_tokens": 8}


def test_a_session_that_an_earlier_release_opened_is_read() -> None:
    """Its state says neither how long it stays open nor what a row may leave out."""
    wire = {"record_version": 2, "nonce": "0f", "group": "g", "scope": "r.0", "min_version": 3,
            "sampling": {"temperature": 1.0, "max_new_tokens": 8}}  # fmt: skip
    state = decode(msgpack.packb(wire), SessionState)
    assert (state.timeout_s, state.is_ending, state.is_closed) == (0.0, False, False)
    assert (state.exact_version, state.images) == (None, ())


def test_an_answer_that_an_earlier_release_recorded_is_read() -> None:
    """It says neither which ids began it nor where and when; no record has more of them than ids."""
    wire = msgpack.unpackb(bytes.fromhex(SESSION_CALL_WIRE))
    assert decode(msgpack.packb({**wire, "num_begun": 1}), SessionCall).num_begun == 1
    with pytest.raises(CorruptMessageError, match="num_begun = 2 must be from 0 to 1"):
        decode(msgpack.packb({**wire, "num_begun": 2}), SessionCall)
    for name in ("num_begun", "replica_id", "started_at", "waited_s", "generated_s"):
        del wire[name]
    call = decode(msgpack.packb(wire), SessionCall)
    assert (call.num_begun, call.replica_id) == (0, "")
    assert (call.started_at, call.waited_s, call.generated_s) == (0.0, 0.0, 0.0)


def test_a_turn_that_an_earlier_release_played_is_read() -> None:
    """It says neither when it began, nor which tools it called, nor how long its environment took."""
    wire = msgpack.unpackb(bytes.fromhex(GROUP_WIRE))
    [turn] = wire["samples"][0]["turns"]
    assert [turn.pop(name) for name in ("started_at", "tools", "environment_s")] == [1.5, ["zoom"], 0.125]
    [sample] = decode(msgpack.packb(wire), Group).samples
    [turn] = sample.turns
    assert (turn.started_at, turn.tools, turn.environment_s, turn.generated_s) == (0.0, (), 0.0, 0.25)


def test_the_name_of_a_session_keeps_its_form() -> None:
    """It is in URLs and in subjects of the bus, which routers and workers of other releases read."""
    nonce = "0f" * 16
    session = SessionId(sample_key=SessionId.new(GROUP.id, 3).sample_key, nonce=nonce)
    run = hashlib.sha256(GROUP.id.run_id.encode()).hexdigest()[:12]
    assert str(session) == f"{run}-7-1-a-3.{nonce}"
    assert SessionId.parse(str(session)) == session
    assert session.sample == 3
    assert SessionId.parse(f"7-1-a-3.{nonce}").sample == 3  # of earlier releases


def test_an_evaluation_has_sessions_of_its_own() -> None:
    """Its groups are numbered from 0 as those of training, and played beside them by one trainer."""
    evaluation = msgspec.structs.replace(GROUP.id, run_id=f"{GROUP.id.run_id}-step-4")
    assert SessionId.new(evaluation, 3).sample_key != SessionId.new(GROUP.id, 3).sample_key
