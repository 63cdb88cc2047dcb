"""Lines of `penstock env` that are wrong, and those that are nearly."""

import json
import re
from typing import Any

import pytest

from services.cli.environment.lines import Script, parse

GOOD: dict[str, Any] = {"id": "a", "gold": "12", "max_turns": 3, "responses": ["one", "two"]}


def read(row: object, **settings: Any) -> Script:
    text = row if isinstance(row, str) else json.dumps(row)
    return parse(text.encode(), is_first=True, **{"profile": "math", "max_turns": None, **settings})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{oops\n", ("not JSON", "write one JSON object per line")),
        ("[1]\n", ("[1] is not a JSON object", '"responses"')),
        ({key: value for key, value in GOOD.items() if key != "id"}, ('"id" is missing',)),
        ({**GOOD, "id": None}, ('"id" = null', "write it as a string")),
        ({key: value for key, value in GOOD.items() if key != "gold"}, ('"gold" is missing', "give the gold answer")),
        ({**GOOD, "gold": 12}, ('"gold" = 12', "quote the answer")),
        ({**GOOD, "max_turns": 0}, ('"max_turns" = 0', "give an integer >= 1")),
        ({**GOOD, "max_turns": "3"}, ('"max_turns" = "3"', "give an integer >= 1")),
        ({**GOOD, "max_turns": True}, ('"max_turns" = true', "give an integer >= 1")),
        (
            {key: value for key, value in GOOD.items() if key != "responses"},
            ('"responses" is missing', "a list of strings"),
        ),
        ({**GOOD, "responses": "one"}, ('"responses" = ', "a list of strings")),
        ({**GOOD, "responses": ["one", 5]}, ('"responses" = 5', "is not a string")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_fault_is_told_by_field_value_and_remedy(bad: object, words: tuple[str, ...]) -> None:
    """The command adds the line's number."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        read(bad)


def test_what_a_line_leaves_out_is_as_the_command_says() -> None:
    """The limit of turns, and the profile; a blank question; none of several gold answers is lost."""
    script = read({"id": 7, "gold": ["12", "12 cm"], "responses": []}, profile="geo3k", max_turns=5)
    assert (script.id, script.max_turns, script.responses) == (7, 5, ())
    assert (script.subject.profile, script.subject.golds) == ("geo3k", ("12", "12 cm"))
    script = read({**GOOD, "profile": "mcq"}, profile="geo3k", max_turns=5)
    assert (script.max_turns, script.subject.profile, script.responses) == (3, "mcq", ("one", "two"))
