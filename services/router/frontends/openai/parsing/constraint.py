"""Converts the required form of an answer for engines."""

import json
from typing import Any

from penstock.v1 import generate_pb2
from services.router.frontends.openai.errors import ParameterError
from services.router.frontends.openai.schema.constraint import JsonFormat, SchemaFormat, StructuredOutputs
from services.router.frontends.openai.schema.requests import GenerationRequest

_ANY_OBJECT = '{"type": "object"}'


def read_constraint(body: GenerationRequest) -> generate_pb2.Constraint | None:
    """Return the form that the request asks for; None: any text.

    Raises:
        ParameterError: it asks for several forms, or names none.
    """
    asked = [] if body.structured_outputs is None else [_of_structured_outputs(body.structured_outputs)]
    match body.response_format:
        case JsonFormat():
            asked.append(generate_pb2.Constraint(json_schema=_ANY_OBJECT))
        case SchemaFormat(json_schema=named):
            asked.append(generate_pb2.Constraint(json_schema=json.dumps(named.schema_)))
    if len(asked) > 1:
        raise ParameterError("response_format", "response_format and structured_outputs are both set; send one")
    return asked[0] if asked else None


def _of_structured_outputs(outputs: StructuredOutputs) -> generate_pb2.Constraint:
    forms: list[dict[str, Any]] = []
    if outputs.json_ is not None:
        schema = outputs.json_
        forms.append({"json_schema": schema if isinstance(schema, str) else json.dumps(schema)})
    if outputs.json_object:
        forms.append({"json_schema": _ANY_OBJECT})
    if outputs.regex is not None:
        forms.append({"regex": outputs.regex})
    if outputs.choice:
        choices = (json.dumps(each, ensure_ascii=False) for each in outputs.choice)
        forms.append({"ebnf": f"root ::= {' | '.join(choices)}"})
    if outputs.grammar is not None:
        forms.append({"ebnf": outputs.grammar})
    if len(forms) != 1:
        raise ParameterError(
            "structured_outputs",
            f"structured_outputs sets {len(forms)} forms; set exactly one of json, json_object, regex, choice, grammar",
        )
    return generate_pb2.Constraint(**forms[0])
