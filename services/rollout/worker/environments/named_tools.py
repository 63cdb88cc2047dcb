"""The tools that come with Penstock, by name, for environments that also have other tools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.environments import Tool
from services.rollout.worker.environments.calculator import calculator_tool
from services.rollout.worker.environments.python import python_tool

_TOOLS: Final[Mapping[str, Callable[[], Tool]]] = {"calculator": calculator_tool, "python": python_tool}


def make_tools(names: Sequence[str]) -> list[Tool]:
    """Make the tools of these names for one episode.

    Raises:
        ValueError: a name is unknown.
    """
    if unknown := [name for name in names if name not in _TOOLS]:
        raise ValueError(f"tools = {list(names)}: {unknown} are unknown; known: {', '.join(sorted(_TOOLS))}")
    return [_TOOLS[name]() for name in names]
