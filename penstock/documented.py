"""Models whose fields are explained by the docstrings below them.

pydantic's `use_attribute_docstrings` does the same, but reads the sources when a class is made, which takes a fifth of
the time that every process spends on its imports. Here they are read only when someone asks for a JSON schema or for a
page of help.
"""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic_core import CoreSchema


class Documented(pydantic.BaseModel):
    """Base of models whose JSON schema describes each field with its docstring, unless the field has a description.

    Fields are found under their alias, or their name.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docstrings(cls).items():
            if (described := properties.get(cls.model_fields[name].alias or name)) is not None:
                described.setdefault("description", text)
        return schema


@functools.cache
def field_docstrings(model: type[pydantic.BaseModel]) -> Mapping[str, str]:
    """Return the docstrings of a model's fields by name, those of inherited fields included.

    A class without a source file, such as one typed into a shell, adds none.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _classes_of(base.__module__).get(base.__qualname__, {})
    return {name: text for name, text in found.items() if name in model.model_fields}


@functools.cache
def _classes_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the attributes' docstrings of each class of a module, by the class's qualified name."""
    if module.partition(".")[0] in ("builtins", "pydantic"):
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_classes_in(tree, ""))


def _classes_in(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", _docstrings(node)
            inner = f"{prefix}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{node.name}.<locals>."
        yield from _classes_in(node, inner)


def _docstrings(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for statement, following in itertools.pairwise(node.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                found[name] = inspect.cleandoc(text)
    return found
