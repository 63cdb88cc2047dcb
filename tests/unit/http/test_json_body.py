"""JSON bodies: what is refused, and that no body takes long to refuse."""

import json

import pytest

from penstock.http.json_body import MalformedJsonError, parse_json


def test_a_key_that_comes_twice_is_named() -> None:
    """The first of them, at any depth; and only where keys must be unique."""
    body = b'{"items": [{"a": 1, "b": 2, "c": 3, "c": 4, "b": 5}]}'
    with pytest.raises(MalformedJsonError, match="the body has 'b' twice in one object; send it once"):
        parse_json(body, unique_keys=True)
    assert parse_json(body) == {"items": [{"a": 1, "b": 5, "c": 4}]}


@pytest.mark.timeout(60)
def test_a_key_among_very_many_that_comes_twice_is_found_in_linear_time() -> None:
    """A body that is made to be slow is refused like any other; counting each key alone would take minutes."""
    body = json.dumps(dict.fromkeys(range(200_000), 0))[:-1].encode() + b', "199999": 0}'
    with pytest.raises(MalformedJsonError, match="199999"):
        parse_json(body, unique_keys=True)


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1, 2**64, -(2**256), 10**99])
def test_a_whole_number_keeps_all_its_digits(number: int) -> None:
    """The bounds in a tool's schema reach the prompt as they were written."""
    value = parse_json(b'{"minimum": %d}' % number)["minimum"]
    assert value == number
    assert isinstance(value, int)


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        ("1e999", "holds 1e999, which is beyond the range of a float"),
        ("-1e999", "holds -1e999, which is beyond"),
        ("9" * 400 + ".0", "holds 99999999999999999999..., which is beyond"),
        ("9" * 101, "holds an integer of 101 characters; send at most 100"),
    ],
)
def test_a_number_that_cannot_be_kept_is_refused(number: str, fault: str) -> None:
    """It would become infinite, or another number; where numbers are text, nothing is lost."""
    body = f'{{"a": {number}}}'.encode()
    with pytest.raises(MalformedJsonError, match=fault):
        parse_json(body)
    assert parse_json(body, numbers_as_text=True) == {"a": number}
