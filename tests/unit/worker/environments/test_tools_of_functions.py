"""A typed function is a tool: what its types let a policy write."""

from typing import Any

import pytest

from penstock.environments import Tool, ToolEnvironment
from tests.support.worker.tool_calls import texts, turn


async def answers(arguments: dict[str, Any]) -> list[str]:
    """What `sort` answers."""
    return texts((await ToolEnvironment([sort]).step(turn(("sort", arguments)))).observation)


def sort(rows: list[dict[str, int | None] | None], span: tuple[float | None, str] | int) -> int:
    """Sort rows.

    Args:
        rows: The rows.
        span: The span.
    """
    return len(rows)


@pytest.mark.parametrize(
    "arguments",
    [{"rows": [None, {"a": None, "b": 1}], "span": [None, "a"]}, {"rows": [], "span": 1}],
)
async def test_a_type_inside_another_may_be_null(arguments: dict[str, Any]) -> None:
    """In lists, in mappings, in tuples and in unions, as the function's types say."""
    assert await answers(arguments) == [str(len(arguments["rows"]))]


async def test_a_type_that_may_not_be_null_is_checked_inside_another() -> None:
    """The words name the place."""
    [words] = await answers({"rows": [{"a": "x"}], "span": 1})
    assert words.startswith("Error in sort: the arguments do not fit: rows[0]: {'a': 'x'} is not valid")


def test_a_function_without_types_makes_no_tool() -> None:
    """The error names the function and what is missing."""

    def bare(length):  # type: ignore[no-untyped-def]
        """Measure.

        Args:
            length: The length.
        """

    with pytest.raises(ValueError, match=r"no schema can be derived from .*bare.*length"):
        Tool.from_function(bare)
