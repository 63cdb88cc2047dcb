"""A Python tool: runs a policy's code in a process without network, files or other processes."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

from penstock.environments import Tool, ToolEnvironment, ToolError
from penstock.errors import ConfigError
from services.rollout.worker.environments.built_in import BuiltIn
from services.rollout.worker.environments.confined_python.interpreter import Interpreter, Run
from services.rollout.worker.environments.confined_python.messages import InterpreterSettings

MODULES: Final = (
    *("bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "time"),
    *("typing", "_strptime"),
    *("numpy", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random"),
)
"""Modules that code may import by default."""

_PARAMETERS = {
    "type": "object",
    "properties": {
        "code": {
            "type": "string",
            "description": "A whole program: nothing is kept from one call to the next. What it prints comes back, and "
            "the value of its last line if that is an expression.",
        }
    },
    "required": ["code"],
    "additionalProperties": False,
}


class Python(BuiltIn, ToolEnvironment):
    """Shows the row and the tool `python`."""

    def __init__(
        self,
        *,
        time_limit_s: float = 10.0,
        memory_limit_mb: int = 256,
        max_characters: int = 4000,
        modules: Sequence[str] = MODULES,
        max_calls_per_turn: int = 4,
        max_turns: int | None = None,
    ) -> None:
        """Play one episode.

        Args:
            time_limit_s: Seconds for one call, from when a processor is free for it.
            memory_limit_mb: Memory that a call may allocate.
            max_characters: Maximum characters of its output, and of its value and its error.
            modules: Modules that code may import; submodules that it needs must be named, too.
            max_calls_per_turn: As in `ToolEnvironment`.
            max_turns: As in `ToolEnvironment`.

        Raises:
            ValueError: an argument is out of range.
        """
        tool = python_tool(
            time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb, max_characters=max_characters, modules=modules
        )
        super().__init__([tool], max_calls_per_turn=max_calls_per_turn, max_turns=max_turns)

    @classmethod
    def prepare(cls, **args: Any) -> None:
        """Check the arguments, and whether the modules' packages are installed; nothing is imported.

        Raises:
            ConfigError: an argument is out of range, or a module is not installed.
        """
        super().prepare(**args)
        if missing := [name for name in args.get("modules", MODULES) if find_spec(name.partition(".")[0]) is None]:
            raise ConfigError(
                f"modules has {', '.join(missing)}, not installed here; install what is missing where workers run, or "
                "leave them out"
            )


def python_tool(
    *,
    time_limit_s: float = 10.0,
    memory_limit_mb: int = 256,
    max_characters: int = 4000,
    modules: Sequence[str] = MODULES,
) -> Tool:
    """Return the tool `python`; arguments are as in `Python`.

    Raises:
        ValueError: an argument is out of range.
    """
    given = {"time_limit_s": time_limit_s, "memory_limit_mb": memory_limit_mb, "max_characters": max_characters}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} = {value} must be above 0")
    settings = InterpreterSettings(
        time_limit_s=time_limit_s,
        memory_limit_mb=memory_limit_mb,
        max_characters=max_characters,
        modules=tuple(modules),
    )
    calls = _Calls(settings)
    return Tool(
        name="python",
        description=f"Runs Python code, for at most {time_limit_s:g} s and without network or files.",
        parameters=_PARAMETERS,
        function=calls.run,
        timeout_s=None,  # it has its own limit, which excludes the wait for a processor
        close=calls.close,
    )


class _Calls:
    """The tool calls of one episode."""

    def __init__(self, settings: InterpreterSettings) -> None:
        self._settings = settings
        self._interpreter: Interpreter | None = None

    async def run(self, code: str) -> str:
        """Run the code and return its output and its value."""
        if self._interpreter is None:
            self._interpreter = Interpreter.acquire(self._settings)
        return self._describe(await self._interpreter.run(code))

    async def close(self) -> None:
        """Release the interpreter."""
        if self._interpreter is not None:
            interpreter, self._interpreter = self._interpreter, None
            await interpreter.release()

    def _describe(self, run: Run) -> str:
        """Return the outcome as text.

        Raises:
            ToolError: the code failed; it includes the output before that.
        """
        dropped = f"\n... ({run.num_dropped} characters more were printed)" if run.num_dropped else ""
        printed = f"{run.printed}{dropped}".rstrip("\n")
        match run.ending:
            case "out_of_time":
                end = f"It was ended after {self._settings.time_limit_s:g} s."
            case "killed":
                end = f"Its process crashed; it may have {self._settings.memory_limit_mb} MB of memory."
            case "finished" if run.error:
                end = run.error
            case _:
                return "\n".join(filter(None, (printed, run.value))) or "It ended and printed nothing."
        raise ToolError("\n".join(filter(None, (printed, end))))
