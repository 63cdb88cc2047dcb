"""Records travel unchanged, and bytes that are no record never become one."""

import math

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptMessageError
from penstock.records import Group, GroupId, Sample, TokenSequence, Turn, Verdict, VersionSpan
from penstock.records.codec import DTYPES, decode, encode
from penstock.records.sample import check_sampled
from tests.contract.golden_records import GROUP


class Box(msgspec.Struct):
    """A record with one array."""

    array: np.ndarray


HASH = "0123456789abcdef" * 4


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    length = draw(st.integers(1, 12))
    mask = draw(hnp.arrays(np.bool_, length))
    mask[draw(st.integers(0, length - 1))] = True
    own = int(mask.sum())
    first = draw(st.integers(1, own))
    spans = [VersionSpan(num_tokens=n, policy_version=v) for v, n in enumerate((first, own - first)) if n]
    return TokenSequence(
        token_ids=draw(hnp.arrays("<i4", length)),
        loss_mask=mask,
        logprobs=draw(hnp.arrays("<f4", length, elements=st.floats(-50, 0, width=32))),
        version_spans=tuple(spans),
        images=tuple(draw(st.lists(st.sampled_from([HASH, HASH[::-1]]), max_size=2))),
        num_prompt_tokens=13,
        num_last_turn_tokens=own,
        routed_experts=draw(st.none() | hnp.arrays(st.sampled_from(["<i4", "|u1"]), (length, 2, 3))),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    verdict = Verdict(score=draw(st.floats(-1, 1)), status="OK", extracted="", method="EXACT")
    return Sample(
        sequences=tuple(draw(st.lists(sequences(), min_size=1, max_size=2))),
        reward=draw(st.none() | st.floats(-1, 1)),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=2)),
        finish_reason=draw(st.sampled_from(["stop", "length", "deadline", "environment", "error"])),
        verdict=draw(st.none() | st.just(verdict)),
        turns=(Turn(replica_id="e", num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=2, reward=0.5),),
        text=draw(st.text(max_size=20)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    played = tuple(draw(st.lists(samples(), min_size=1, max_size=3)))
    group_id = GroupId(
        run_id=draw(st.text(max_size=10)),
        index=draw(st.integers(0, 2**62)),
        attempt=draw(st.integers(0, 5)),
        trainer_epoch="a",
    )
    return Group(id=group_id, num_samples=len(played), samples=played, worker_id="w")


def same(left: object, right: object) -> bool:
    """Equality that reads arrays."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.fixture(scope="module")
def sequence() -> TokenSequence:
    return TokenSequence(
        token_ids=np.array([7, 8, 9, 10], dtype=np.int32),
        loss_mask=np.array([False, True, True, True]),
        logprobs=np.array([0, -1, -2, -3], dtype=np.float32),
        version_spans=(VersionSpan(num_tokens=1, policy_version=3), VersionSpan(num_tokens=2, policy_version=4)),
        images=(HASH,),
        num_prompt_tokens=1,
        num_last_turn_tokens=3,
    )


@given(groups())
def test_a_group_travels_unchanged(group: Group) -> None:
    """Every field, every array bit for bit."""
    assert same(decode(encode(group), Group), group)


@given(
    st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))
)
def test_an_array_travels_unchanged(array: np.ndarray) -> None:
    """All dtypes and shapes, empty ones and scalars included."""
    assert same(decode(encode(Box(array)), Box).array, array)


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4"), np.arange(12, dtype="<i8").reshape(3, 4).T])
def test_memory_order_does_not_travel(array: np.ndarray) -> None:
    """Big-endian and transposed arrays arrive with the same values."""
    assert np.array_equal(decode(encode(Box(array)), Box).array, array)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([object()]), np.zeros(1, np.float16)])
def test_an_array_of_another_dtype_is_refused_by_the_sender(array: np.ndarray) -> None:
    """Better there than at the receiver."""
    with pytest.raises(TypeError, match="cannot travel"):
        encode(Box(array))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    """Random bytes raise CorruptMessageError, whatever they are; a map without a version is of the first."""
    with pytest.raises(CorruptMessageError, match=f"{len(data)} bytes are not a Group|a Group in record version"):
        decode(data, Group)


# What a stranger may write where an array belongs.
_wire_arrays = st.tuples(
    st.sampled_from([*sorted(DTYPES), "<c8", "O", "<f2", "no", ""]) | st.integers(0, 9),
    st.lists(st.integers(-3, 2**63) | st.sampled_from([0, 1, 2]) | st.booleans() | st.none(), max_size=70) | st.none(),
    st.binary(max_size=64) | st.text(max_size=3),
)


@given(_wire_arrays | st.lists(st.integers(-9, 9), max_size=4) | st.none() | st.binary(max_size=4))
def test_an_array_decodes_to_what_it_says_or_not_at_all(wire: object) -> None:
    """A decoded array has the dtype, the shape and the bytes that were sent; everything else is refused."""
    data = msgspec.msgpack.encode({"array": wire})
    try:
        array = decode(data, Box).array
    except CorruptMessageError:
        return
    dtype, shape, raw = wire  # type: ignore[misc]
    assert array.dtype.str == dtype
    assert list(array.shape) == list(shape)
    assert array.nbytes == len(raw) == math.prod(shape) * np.dtype(dtype).itemsize
    assert array.tobytes() == raw


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 4], [2**63, 0, 2**63], [1] * 65])
def test_absurd_shapes_are_refused(shape: list[int]) -> None:
    """Shapes that numpy itself cannot hold are no crash."""
    data = msgspec.msgpack.encode({"array": ("|u1", shape, b"x" if 0 not in shape else b"")})
    with pytest.raises(CorruptMessageError):
        decode(data, Box)


def test_a_boolean_is_0_or_1(sequence: TokenSequence) -> None:
    """Any other byte would be true for one reader and count for more than one for another."""
    data = msgspec.msgpack.encode({"array": ("|b1", [2], b"\x01\x02")})
    with pytest.raises(CorruptMessageError, match="boolean"):
        decode(data, Box)


def test_every_truncation_is_refused(sequence: TokenSequence) -> None:
    """No prefix of a record is a record; nor is a record with something behind it."""
    data = encode(sequence)
    for length in range(len(data)):
        with pytest.raises(CorruptMessageError):
            decode(data[:length], TokenSequence)
    with pytest.raises(CorruptMessageError):
        decode(data + b"\x00", TokenSequence)


def test_no_flipped_bit_changes_a_length(sequence: TokenSequence) -> None:
    """After any one-bit error a sequence is refused, or its arrays are as long as each other and as its spans say."""
    data = encode(sequence)
    num_survivors = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            got = decode(bytes(flipped), TokenSequence)
        except CorruptMessageError:
            continue
        num_survivors += 1
        assert [len(got.token_ids), len(got.loss_mask), len(got.logprobs)] == [4, 4, 4]
        assert [array.dtype.str for array in (got.token_ids, got.loss_mask, got.logprobs)] == ["<i4", "|b1", "<f4"]
        assert sum(span.num_tokens for span in got.version_spans) == got.loss_mask.sum() == 3
        assert all(span.num_tokens >= 1 and span.policy_version >= 0 for span in got.version_spans)
        assert np.isfinite(got.logprobs).all()
    assert num_survivors > 0, "flips of values must survive, else this test proves nothing"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"loss_mask": np.zeros(3, np.bool_)}, "loss_mask must be"),
        ({"token_ids": np.zeros(4, np.int64)}, "token_ids must be <i4"),
        ({"logprobs": np.full(4, np.nan, np.float32)}, "not finite"),
        ({"version_spans": (VersionSpan(num_tokens=2, policy_version=3),)}, "version spans cover 2 tokens"),
        ({"loss_mask": np.zeros(4, np.bool_), "version_spans": ()}, "no token of the policy's own"),
    ],
)
def test_a_record_that_breaks_its_own_rules_is_refused(sequence: TokenSequence, change: dict, what: str) -> None:
    """At construction, and in the same words when it comes over the bus."""
    fields = {name: getattr(sequence, name) for name in sequence.__struct_fields__} | change
    with pytest.raises(ValueError, match=what):
        TokenSequence(**fields)
    wire = msgspec.msgpack.decode(encode(sequence))
    broken = msgspec.msgpack.decode(encode(msgspec.defstruct("Change", list(change))(**change)))
    with pytest.raises(CorruptMessageError, match=what):
        decode(msgspec.msgpack.encode(wire | broken), TokenSequence)


@pytest.mark.parametrize(
    ("input_ids", "output_ids", "logprobs", "num_spanned", "what"),
    [
        ([5.0], [6, 7], [-0.5, -1.0], 2, "input_ids must be <i4"),
        ([5], [[6, 7]], [-0.5], 1, r"output_ids must be <i4\[1\]"),
        ([5], [6, 7], [-0.5], 2, r"logprobs must be <f4\[2\], not <f4\[1\]"),
        ([5], [6, 7], [-0.5, -1.0], 3, "2 tokens were sampled, and version spans cover"),
        ([5], [], [], 0, "0 tokens were sampled"),
        ([5], [6, 7], [-0.5, np.nan], 2, "not finite"),
    ],
)
def test_an_answer_whose_parts_do_not_fit_is_refused(
    input_ids: list, output_ids: list, logprobs: list, num_spanned: int, what: str
) -> None:
    """Whether it is a recorded call or one of an agent's session."""
    arrays = (
        np.array(input_ids, "<f4" if float in map(type, input_ids) else "<i4"),
        np.array(output_ids, "<i4"),
        np.array(logprobs, "<f4"),
    )
    spans = (VersionSpan(num_tokens=num_spanned, policy_version=3),) if num_spanned else ()
    with pytest.raises(ValueError, match=what):
        check_sampled(*arrays, spans)


@pytest.mark.parametrize("wrong", [{"num_prompt_tokens": "one"}, {"images": ["x"]}, {"token_ids": None}])
def test_a_field_of_the_wrong_kind_is_refused(sequence: TokenSequence, wrong: dict) -> None:
    """Wrong types, and words that are not hashes."""
    wire = msgspec.msgpack.decode(encode(sequence)) | wrong
    with pytest.raises(CorruptMessageError, match=r"num_prompt_tokens|image|token_ids"):
        decode(msgspec.msgpack.encode(wire), TokenSequence)


def test_a_record_of_another_kind_is_refused(sequence: TokenSequence) -> None:
    """A sequence is not a group."""
    with pytest.raises(CorruptMessageError):
        decode(encode(sequence), Group)


def test_deep_nesting_is_refused() -> None:
    """A bomb of nested arrays ends in an error, not in a crash."""
    with pytest.raises(CorruptMessageError):
        decode(b"\x81\xa5array" + b"\x91" * 100_000, Box)


def test_fields_that_a_later_release_added_are_ignored(sequence: TokenSequence) -> None:
    """Records are extended by fields with defaults, so neighbouring releases share a bus."""
    wire = msgspec.msgpack.decode(encode(sequence)) | {"added_later": 1}
    assert same(decode(msgspec.msgpack.encode(wire), TokenSequence), sequence)


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_record_of_another_version_is_refused_with_both_numbers(version: int | None) -> None:
    """Version 1 had no number; nothing of it is read as if it were version 2."""
    wire = {"prompt": {}, "samples": []} | ({} if version is None else {"record_version": version})
    with pytest.raises(CorruptMessageError, match=f"a Group in record version {version or 1}, .* reads version 2"):
        decode(msgspec.msgpack.encode(wire), Group)


@pytest.mark.parametrize("text", ["run/3/1/a", "run-1/0/0/0af3"])
def test_a_message_id_is_read_back(text: str) -> None:
    """Of messages that cannot be decoded, the id still says which group will not come."""
    group_id = GroupId.parse(text)
    assert group_id is not None
    assert group_id.message == text
    assert group_id.scope == text.replace("/", ".")


@pytest.mark.parametrize("text", ["run/3/1/a", "requeued/3/1/a"])
def test_the_id_of_a_message_that_was_put_back_is_that_of_its_group(text: str) -> None:
    """However often; a run may have any name."""
    group_id = GroupId.parse(f"requeued/9/requeued/2/{text}")
    assert group_id is not None
    assert group_id.message == text


@pytest.mark.parametrize("text", ["", "run/3/1", "run/x/1/a", "run/-1/0/a", "a/b/c/d/e", "requeued/2/3/1/a"])
def test_what_is_no_message_id_is_none(text: str) -> None:
    """No error: whoever asks has a message that is broken already."""
    assert GroupId.parse(text) is None


def test_half_an_emoji_does_not_cost_a_group() -> None:
    """JavaScript cuts texts there, and an error of a person's own code may hold anything."""
    sample = msgspec.structs.replace(GROUP.samples[0], error="no \ud83d", ended_by="a\ud800")
    group = msgspec.structs.replace(GROUP, samples=(sample,), num_samples=1)
    (found,) = decode(encode(group), Group).samples
    assert (found.error, found.ended_by) == ("no \ufffd", "a\ufffd")
    assert found.turns == sample.turns
