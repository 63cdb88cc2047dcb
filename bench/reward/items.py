"""Items for the benchmarks: drawn with a seed, like answers to questions of plane geometry."""

import random
from dataclasses import dataclass

from penstock.v1 import reward_pb2

_SENTENCES = (
    "We are given the figure and asked for the unknown length.",
    "The two triangles are similar, since they share an angle and have parallel sides.",
    "By the Pythagorean theorem, the square of the hypotenuse is the sum of the squares of the legs.",
    "The angles of the triangle add up to $180^\\circ$, so we subtract the two that are known.",
    "Setting up the proportion gives $\\frac{x}{12} = \\frac{5}{8}$, which we cross-multiply.",
    "An inscribed angle is half of the arc that it intercepts.",
    "In a 30-60-90 triangle the sides are in the ratio $1 : \\sqrt{3} : 2$.",
    "Substituting back confirms that the value satisfies the equation.",
    "The diagonals of the rhombus are perpendicular and bisect each other.",
)

_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Gold answers, of which one match suffices, and a response to verify."""

    golds: tuple[str, ...]
    response: str

    def to_proto(self, *, item_id: str = "", profile: str = "geo3k", deadline_s: float = 0.0) -> reward_pb2.VerifyItem:
        """Return the question as the service's clients send it."""
        return reward_pb2.VerifyItem(
            item_id=item_id, golds=self.golds, response=self.response, profile=profile, deadline_s=deadline_s
        )


def typical(count: int, *, seed: int = 0) -> list[Question]:
    """Return numbers as golds; responses of 300 to 600 characters, of which 3 in 5 are right and 1 in 20 has no box."""
    draw = random.Random(seed)
    return [_typical(draw) for _ in range(count)]


def symbolic(count: int, *, seed: int = 0) -> list[Question]:
    """Return expressions and equations, half of the responses right, in another form; eight responses per gold."""
    draw = random.Random(seed)
    return [question for _ in range(-(-count // _GROUP)) for question in _symbolic_group(draw)][:count]


def _typical(draw: random.Random) -> Question:
    gold, answer, wrong = _number(draw)
    fate = draw.random()
    written = answer if fate < 0.6 else wrong
    if 0.5 < fate < 0.55:
        written += draw.choice([r"^\circ", r"\text{ cm}", " units", "°"])
    text = _reasoning(draw)
    return Question(golds=(gold,), response=text if fate > 0.95 else f"{text} The answer is $\\boxed{{{written}}}$.")


def _number(draw: random.Random) -> tuple[str, str, str]:
    """Return a gold answer as data sets write it, the same as models write it, and another number."""
    a, b = draw.randint(2, 60), draw.choice([2, 3, 5, 6, 7, 10, 13])
    kind = draw.random()
    if kind < 0.6:
        whole = draw.randint(1, 180)
        return str(whole), str(whole), str(whole + draw.randint(1, 9))
    if kind < 0.75:
        return f"{a}.{b % 10}", f"{a}.{b % 10}", f"{a + 1}.{b % 10}"
    if kind < 0.87:
        return f"{a} \\sqrt {{ {b} }}", f"{a}\\sqrt{{{b}}}", f"{a + 1}\\sqrt{{{b}}}"
    if kind < 0.95:
        return f"\\frac {{ {a} }} {{ {b} }}", f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a + 1}}}{{{b}}}"
    return f"{a} \\pi", f"{a}\\pi", f"{a + 1}\\pi"


def _symbolic_group(draw: random.Random) -> list[Question]:
    a, b, x = draw.randint(2, 19), draw.randint(1, 19), draw.choice("xyt")
    gold, right = draw.choice(
        [
            (f"{a}{x}-{b}", f"-{b}+{a}{x}"),
            (f"{x}^2+{2 * a}{x}+{a * a}", f"({x}+{a})^2"),
            (f"{x}^2-{a * a}", f"({x}-{a})({x}+{a})"),
            (f"\\frac{{{x}+{a}}}{{2}}", f"\\frac{{{x}}}{{2}}+\\frac{{{a}}}{{2}}"),
            (f"\\frac{{{a}}}{{{x}-{b}}}", f"-\\frac{{{a}}}{{{b}-{x}}}"),
            (f"{a}{x}\\sqrt{{3}}", f"\\sqrt{{3}}\\cdot {a}{x}"),
            (f"\\sqrt{{{x}^2+{a}}}", f"\\sqrt{{{a}+{x}^2}}"),
            (f"y={a}x+{b}", f"y={b}+{a}x"),
            (f"{a}\\ln({x})+\\ln({b + 1})", f"\\ln({b + 1})+\\ln({x})\\cdot {a}"),
            (f"\\sin(2{x})+{a}", f"2\\sin({x})\\cos({x})+{a}"),
        ]
    )
    answers = [right if draw.random() < 0.5 else f"{right}+{draw.randint(1, 9)}" for _ in range(_GROUP)]
    return [
        Question(golds=(gold,), response=f"{_reasoning(draw)} The answer is $\\boxed{{{answer}}}$.")
        for answer in answers
    ]


def _reasoning(draw: random.Random) -> str:
    target, text = draw.randint(270, 500), draw.choice(_SENTENCES)
    while len(text) < target:
        text += f" {draw.choice(_SENTENCES)}"
    return f"<think>\n{text}\n</think>\n" if draw.random() < 0.5 else text
