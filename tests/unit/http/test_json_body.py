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
