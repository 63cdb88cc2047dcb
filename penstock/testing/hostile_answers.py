"""Items that hang or bloat verifiers: stored ones, if present, and generated ones that are worse."""

import json
from pathlib import Path
from typing import NamedTuple


class HostileItem(NamedTuple):
    """A response that is wrong, or not an answer at all, unless `may_be_right`."""

    name: str
    gold: str
    response: str
    may_be_right: bool = False


def stored_items(path: Path) -> list[HostileItem]:
    """Return the lines of a JSON Lines file; empty if it is missing."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    harmless = ("200k boxed", "NUL", "lone surrogate", "RTL", "1MB prose", "1MB latex", "1MB dollars", "1MB backslash")
    return [
        HostileItem(
            row["name"],
            row["gold"],
            row["response"].encode("utf-8", "replace").decode(),
            row["name"].startswith(harmless),
        )
        for row in rows
    ]


def generated_items() -> list[HostileItem]:
    """Return golds that only a worker can compare with, and answers that keep it busy."""
    pairs = {
        "integrals that have no form": (
            r"\int \frac{\sin x}{x^5+e^x} dx",
            r"\int \frac{\cos x}{x^5+e^x} dx",
        ),
        "definite integrals": (r"\int_0^1 x^x dx", r"\int_0^1 x^{-x} \sin(x^{x}) dx"),
        "sums that have no form": (r"\sum_{k=1}^{n} \frac{1}{k^3+k+1}", r"\sum_{k=1}^{n} \frac{1}{k^3+k+2}"),
        "a product": (r"\prod_{k=1}^{n} (1+\frac{1}{k^3+1})", r"\prod_{k=1}^{n} (1+\frac{1}{k^4+k})"),
        "a limit": (
            r"\lim_{x\to 0} \frac{\sin x}{x^a}",
            r"\lim_{x\to 0} \frac{\sin(\tan(\sin x))-\tan(\sin(\tan x))}{x^a}",
        ),
        "an equation": (r"x^{12}+3x^{7}-2x^{5}=\sin(x)", r"x^{11}+3x^{7}-2x^{5}+17x-3=\sin(x)"),
        "an equation in three variables": (
            r"x^5y+z^7=\sin(xyz)",
            r"x^5+y^5z=\tan(xyz)+\sqrt{x^2+y^2z}",
        ),
        "an inequality": (r"x^3 > \sin x + 1", r"x^{9}-3x^{5}+x^2 \le \sqrt{x^3+2} + \sin x"),
        "an inequality and an interval": (r"(-\infty,1)", r"x^{7}+\sin(x^2)<2^{x}+\cos x"),
        "a union": (r"(-\infty,-1)\cup(2,\infty)", r"|x^{5}-\sin x| > x^{2}+2^{x}"),
        "floors": (
            r"\lfloor x \rfloor",
            r"\lfloor \sin^{40}(x)+\cos^{37}(2x)\tan^{23}(3x)\sec^{31}(x)-\sqrt{x^{17}+1} \rfloor",
        ),
        "a large power of a sum": (r"\frac{1}{x+y+z}", r"\frac{(x+y+z)^{60}}{(z+y+x)^{61}}+\frac{(x-y)^{64}}{z^{64}}"),
        "towers of variables": (r"x^{y}", r"x^{y^{x^{y^{x^{y}}}}}"),
        "exponentials of exponentials": (r"e^{x}", r"e^{e^{e^{e^{e^{x}}}}}"),
        "a factorial of a factorial": ("n!", "((n!)!)!"),
        "binomials": (r"\binom{n}{2}", r"\binom{\binom{n^{9}}{n^{8}}}{n^{7}}"),
        "nested roots": (r"\sqrt{x}", r"\sqrt{x+" * 20 + "1" + "}" * 20),
        "nested fractions": (r"\frac{1}{x}", r"\frac{1}{x+" * 20 + "1" + "}" * 20),
        "nested absolute values": ("|x|", "|x+|y-|x+|y-|x+|y-|x+|y-|x|||||||||"),
        "nested functions": (r"\sin x", r"\sin(\cos(\tan(\ln(" * 5 + "x" + "))))" * 5),
        "many terms": ("x^2", "+".join(f"x^{{{n}}}y" for n in range(60))),
        "many variables": (
            "+".join("abcdfghjklm") + "+" + r"\sin a",
            "".join(f"({letter}+1)^{{64}}" for letter in "abcdfghjklm") + r"\sin a",
        ),
        "a long product": (r"\sin x", "".join(rf"\sin({n}x+1)" for n in range(40))),
        "a large determinant": (
            r"\begin{pmatrix}1&x\\2&y\end{pmatrix}",
            r"\begin{pmatrix}" + r"\\".join("&".join("xyz"[(n + m) % 3] for m in range(9)) for n in range(9))
            + r"\end{pmatrix}",
        ),
        "matrices of functions": (
            r"\begin{pmatrix}\lfloor x \rfloor & 1\end{pmatrix}",
            r"\begin{pmatrix}\lfloor \sin^{40}(x)+\tan^{23}(x) \rfloor & \lceil x^{60} \rceil\end{pmatrix}",
        ),
        "large sets": (
            r"\{\lfloor x \rfloor,\lceil x \rceil, 1\}",
            r"\{" + ",".join(rf"\lfloor x+{n} \rfloor" for n in range(20)) + r"\}",
        ),
        "words": ("x+y", "letters and letters and letters and letters " * 8),
        "operators": (r"\frac{1}{x}", "+-" * 200 + "x"),
        "digits and letters": (r"\frac{1}{x}", "9x" * 200),
        "code": (r"\frac{1}{x}", r"__import__('os').system('sleep 9')"),
        "brackets": (r"\frac{1}{x}", "([" * 12 + "x" + "])" * 12),
        "commas": ("(x, y)", "(" + "," * 200 + ")"),
        "equals signs": ("y=x", "x=" * 150 + "y"),
        "inequality signs": ("1<x<2", "1" + "<x" * 100),
        "subscripts": ("x_1", "x_{" * 20 + "1" + "}" * 20),
        "piecewise": (r"|x|", r"\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases}"),
    }  # fmt: skip
    return [HostileItem(name, gold, rf"So \boxed{{{answer}}}") for name, (gold, answer) in pairs.items()]
