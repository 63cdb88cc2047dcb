"""Field docstrings as help texts and as descriptions in JSON schemas."""

from typing import Annotated, ClassVar

import pydantic

from penstock.documented import Documented, field_docstrings


class Inner(Documented):
    """A part."""

    size: int = 1
    """Its size,
    in cells."""


class Outer(Documented):
    """The whole."""

    name: str
    """What people call it."""
    inner: Inner = Inner()
    """The first part."""
    other: Inner | None = None
    """Another part."""
    renamed: int = pydantic.Field(2, alias="class")
    """Known by another name outside."""
    given: Annotated[int, pydantic.Field(description="As it was given.")] = 3
    """As it stands here."""
    bare: int = 4
    number: ClassVar[int] = 5
    """Of the class, and no field."""


class Heir(Outer):
    """A special whole."""

    name: str = "heir"
    """What its parents call it."""


def test_every_field_has_the_docstring_below_it() -> None:
    """On lines of its own indentation, and an heir has those of what it inherits."""
    assert field_docstrings(Inner) == {"size": "Its size,\nin cells."}
    of_heir = field_docstrings(Heir)
    assert of_heir.keys() == {"name", "inner", "other", "renamed", "given"}
    assert (of_heir["name"], of_heir["inner"]) == ("What its parents call it.", "The first part.")


def test_a_schema_describes_fields() -> None:
    """Also those that hold other models; a description that was given comes first."""
    schema = Outer.model_json_schema()
    described = {name: each.get("description") for name, each in schema["properties"].items()}
    assert described == {
        "name": "What people call it.",
        "inner": "The first part.",
        "other": "Another part.",
        "class": "Known by another name outside.",
        "given": "As it was given.",
        "bare": None,
    }
    assert schema["description"] == "The whole."
    assert schema["$defs"]["Inner"]["properties"]["size"]["description"] == "Its size,\nin cells."


def test_a_class_of_a_function_has_its_own_docstrings() -> None:
    """As classes of the same name elsewhere have theirs."""

    class Inner(Documented):
        size: int
        """Another size."""

    assert field_docstrings(Inner) == {"size": "Another size."}


def test_a_class_without_source_has_no_docstrings() -> None:
    """Of a shell, or made by a function."""
    made = pydantic.create_model("Made", __base__=Documented, size=(int, 1))
    typed: dict[str, object] = {"__name__": "nowhere"}
    exec('from penstock.documented import Documented\nclass Typed(Documented):\n    size: int\n    "Lost."', typed)
    for model in (made, typed["Typed"]):
        assert isinstance(model, type)
        assert issubclass(model, Documented)
        assert field_docstrings(model) == {}
        assert model.model_json_schema()["properties"]["size"]["type"] == "integer"
