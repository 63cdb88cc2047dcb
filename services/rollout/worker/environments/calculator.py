"""A calculator, so that a policy with a picture before it need not calculate in its head."""

from fractions import Fraction

from penstock.environments import Tool, ToolEnvironment, ToolError
from services.rollout.worker.environments.arithmetic import ArithmeticRefusal, Number, evaluate
from services.rollout.worker.environments.built_in import BuiltIn
from services.rollout.worker.environments.trigonometry import AngleUnit

_PARAMETERS = {
    "type": "object",
    "properties": {
        "expression": {
            "type": "string",
            "description": "For example 2*sqrt(3)/5 + sin(30). Operators + - * / // % **, constants pi and e, "
            "functions sqrt cbrt abs round floor ceil min max exp ln log sin cos tan asin acos atan atan2.",
        },
        "angle_unit": {
            "type": "string",
            "enum": ["degrees", "radians"],
            "description": "Of all angles; needed for sin, cos, tan and their inverses.",
        },
    },
    "required": ["expression"],
    "additionalProperties": False,
}
_FIGURES = 12


class Calculator(BuiltIn, ToolEnvironment):
    """Shows the row and the tool `calculator`."""

    def __init__(self, *, max_calls_per_turn: int = 4, max_turns: int | None = None) -> None:
        """Play one episode; limits are as in `ToolEnvironment`."""
        super().__init__([calculator_tool()], max_calls_per_turn=max_calls_per_turn, max_turns=max_turns)


def calculator_tool() -> Tool:
    """Return the tool `calculator`."""
    return Tool(
        name="calculator",
        description="Computes an expression: exactly where numbers are rational, else to 12 figures.",
        parameters=_PARAMETERS,
        function=_calculate,
    )


async def _calculate(expression: str, angle_unit: AngleUnit | None = None) -> str:
    """Evaluate outside any thread: accepted expressions take less than a millisecond."""
    try:
        return _shown(evaluate(expression, angle_unit))
    except ArithmeticRefusal as refusal:
        raise ToolError(str(refusal)) from None


def _shown(value: Number) -> str:
    """Format an exact value with its decimal, or the decimal alone; mark rounded decimals."""
    if isinstance(value, Fraction):
        decimal = f"{float(value):.{_FIGURES}g}"
        if value.denominator == 1:
            return str(value)
        return f"{value} = {decimal}" if Fraction(decimal) == value else f"{value}, about {decimal}"
    return f"about {value:.{_FIGURES}g}"
