"""Texts to the values that a tool's schema describes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.chat.argument_values import arguments_json, parameter_types, read_json, typed_value


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ["string"], "5"),
        ("null", ["string"], "null"),
        ("null", ["string", "null"], None),
        ("None", ["integer"], None),
        ("null", [], None),
        ("None", [], "None"),
        (" 5 ", ["integer"], 5),
        ("-007", ["integer"], -7),
        ("5.0", ["integer"], 5),
        ("5.5", ["integer"], "5.5"),
        ("five", ["integer"], "five"),
        ("5", ["number"], 5),
        ("5.50", ["number"], 5.5),
        ("1e3", ["number"], 1000.0),
        ("nan", ["number"], "nan"),
        ("1e999", ["number"], "1e999"),
        ("1_000", ["integer"], "1_000"),
        ("９", ["integer"], "９"),
        ("True", ["boolean"], True),
        ("false", ["boolean"], False),
        ("yes", ["boolean"], "yes"),
        ("[1, 2]", ["array"], [1, 2]),
        ("(1, 2)", ["array"], "(1, 2)"),
        ('{"a": 1}', ["array"], '{"a": 1}'),
        ('{"a": 1}', ["object"], {"a": 1}),
        ("5", ["string", "integer"], "5"),
        ("5", ["integer", "string"], 5),
        ("x", ["integer", "string"], "x"),
        ("5", ["unheard of"], "5"),
        ("5", [], 5),
        ("[1", [], "[1"),
        ("x", [], "x"),
        ("NaN", [], "NaN"),
        ("9" * 5000, ["integer"], "9" * 5000),
    ],
)
def test_a_text_is_the_value_of_the_first_type_that_it_fits(text: str, types: list[str], value: Any) -> None:
    """Or itself: a published parser's False for `yes` would be a value that nobody wrote."""
    found = typed_value(text, types)
    assert (found, type(found)) == (value, type(value))


def tool(schema: Any, **root: Any) -> list[dict[str, Any]]:
    """A tool with one parameter."""
    parameters = {"type": "object", "properties": {"p": schema}, **root}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ["integer"]),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["string", "null"]),
        ({"allOf": [{"oneOf": [{"type": "number"}, {"type": "number"}]}]}, ["number"]),
        ({"enum": ["left", 3, True, None]}, ["string", "integer", "boolean", "null"]),
        ({"const": {"a": 1}}, ["object"]),
        ({"$ref": "#/$defs/Side"}, ["string"]),
        ({"$ref": "#/$defs/Loop"}, []),
        ({"$ref": "https://example.com/x"}, []),
        ({"enum": "no list"}, []),
        ({}, []),
        (True, []),
        (None, []),
    ],
)
def test_the_types_of_a_parameter_are_found_wherever_its_schema_has_them(schema: Any, types: list[str]) -> None:
    """In its order; a schema that says nothing, or nothing sound, has none."""
    definitions = {"Side": {"enum": ["left", "right"]}, "Loop": {"$ref": "#/$defs/Loop"}}
    tools = tool(schema, **{"$defs": definitions})
    assert parameter_types(tools, "f", "p") == types
    assert parameter_types([tools[0]["function"]], "f", "p") == types
    assert parameter_types(tools, "f", "q") == parameter_types(tools, "g", "p") == parameter_types([{}], "f", "p") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TYPES = st.lists(st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null", "odd"]))


@given(JSON)
def test_json_comes_back_as_it_was_written(value: Any) -> None:
    """Every value that a call can hold."""
    assert read_json(arguments_json(value)) == value


@given(st.text() | JSON.map(arguments_json) | st.text("0123456789+-.eE_ "), TYPES)
def test_no_text_raises_and_every_value_can_travel(text: str, types: list[str]) -> None:
    """Whatever the schema asks for."""
    arguments_json({"p": typed_value(text, types)}).encode()
