"""Forms that an answer must have, as OpenAI, vLLM and SGLang write them."""

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from services.router.frontends.openai.schema.base import Items, RequestModel

JsonSchema: TypeAlias = dict[str, Any]


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonFormat(RequestModel):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestModel):
    """A JSON schema."""

    _ignored = ("name", "description", "strict")
    schema_: Annotated[JsonSchema, pydantic.Field(alias="schema")]
    """The schema, which is always kept."""


class SchemaFormat(RequestModel):
    """A JSON value that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema
    """The schema."""


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonFormat | SchemaFormat, pydantic.Field(discriminator="type")]
FORMAT_TYPES = ("text", "json_object", "json_schema")
"""The types of formats."""


class StructuredOutputs(RequestModel):
    """vLLM's form: one of these."""

    json_: Annotated[JsonSchema | str | None, pydantic.Field(alias="json")] = None
    """A JSON schema, or the text of one."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: Items[str] | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """A grammar in XGrammar's EBNF."""
    json_object: bool = False
    """Any JSON object."""
