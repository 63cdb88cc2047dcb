"""Write the table of docs/reward/profiles.md: what each profile says of telling pairs.

python -m tools.profile_table            write it
python -m tools.profile_table --check    only say whether it is current, by the exit status
"""

import asyncio
import sys
from pathlib import Path

from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.item import Item
from services.reward.verifier import Scored, Verifier

_PAGE = Path(__file__).parents[1] / "docs" / "reward" / "profiles.md"
_BEGIN, _END = "<!-- table: python -m tools.profile_table -->\n", "<!-- end of table -->\n"
_PROFILES = ("math", "geo3k", "mcq", "slime_math", "deepscaler", "dapo", "verl_geo3k", "math_verify", "f1", "gpqa")
_DEADLINE_S = 20.0
"""The table must not depend on how busy the machine is."""

PAIRS = (
    ("5", r"<think>2+3</think> It is \boxed{5}."),
    ("5", r"It is \boxed{5}."),
    ("5", r"<think>2+3</think> Answer: 5"),
    ("5", r"<think>It may be \boxed{5}"),
    ("5", r"<think>\boxed{4}</think> It is \boxed{5}"),
    ("5", r"First \boxed{4}, no: \boxed{5}"),
    ("5", r"</think>\boxed{4}. No, the final answer is 5."),
    ("5", r"</think>The answer is 4. The answer is 5."),
    ("5", r"</think>\boxed{5 \text{ or } 6}"),
    ("5", r"</think>\boxed{2+3}"),
    ("5", r"</think>\boxed{2+3=5}"),
    ("5", r"</think>\boxed{\frac{10}{2}}"),
    ("5", r"</think>\boxed{5.0}"),
    ("5", r"</think>\boxed{5.04}"),
    ("5", r"</think>\boxed{x = 5}"),
    ("5", r"</think>\boxed{5 \text{ cm}}"),
    ("5 cm", r"</think>\boxed{5 m}"),
    ("8.5", r"</think>\boxed{8.46}"),
    ("270", r"</think>\boxed{270.04}"),
    ("1234", r"</think>\boxed{1,234}"),
    (r"\frac{1}{2}", r"</think>\boxed{0.5}"),
    (r"\frac{1}{2}", r"</think>\boxed{\frac{2}{4}}"),
    (r"$\frac{1}{2}$", r"</think>\boxed{\frac{2}{4}}"),
    (r"3\sqrt{2}", r"</think>\boxed{\sqrt{18}}"),
    (r"3\sqrt{2}", r"</think>\boxed{4.243}"),
    (r"3\sqrt{2}", r"</think>\boxed{4.24}"),
    (r"2\pi", r"</think>\boxed{2π}"),
    (r"50\%", r"</think>\boxed{0.5}"),
    ("(3,-2)", r"</think>\boxed{\left(3, -2\right)}"),
    (r"\{1,2\}", r"</think>\boxed{\{2,1\}}"),
    ("x^2+2x+1", r"</think>\boxed{(x+1)^2}"),
    (r"$\frac{1}{2}$", "The final answer is $0.5$. I hope it is correct."),
    ("C", "</think>The answer is C."),
    ("C", r"</think>\boxed{C}"),
    ("C", "</think>The answer is A or C."),
    ("2^{100}", r"</think>\boxed{4^{50}}"),
)
"""Gold answer and response."""


async def make_table() -> str:
    """The table as Markdown, judged by real worker processes."""
    config = RewardConfig(workers=1, deadline_s=_DEADLINE_S)
    pool = WorkerPool(num_workers=1, memory_limit_bytes=config.memory_limit_mb * 2**20, recycle_after=1000)
    verifier = Verifier(config, pool)
    try:
        await pool.start()
        items = [
            Item(golds=[gold], response=response, profile=profile) for gold, response in PAIRS for profile in _PROFILES
        ]
        verdicts = iter(await verifier.verify(items))
    finally:
        await verifier.close()
        await pool.close()
    lines = [f"| gold answer | response | {' | '.join(f'`{name}`' for name in _PROFILES)} |"]
    lines.append("|---|---|" + ":---:|" * len(_PROFILES))
    for gold, response in PAIRS:
        cells = [_code(gold), _code(response), *(_cell(next(verdicts)) for _ in _PROFILES)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(verdict: Scored) -> str:
    score = f"{verdict.score:.2f}".rstrip("0").rstrip(".")
    marks = {Status.OK: "", Status.NO_ANSWER: " n", Status.UNPARSEABLE: " u", Status.GOLD_INVALID: " g"}
    return score + marks.get(verdict.finding.status, f" {verdict.finding.status}")


def main() -> int:
    """Write the table, or check that it is current."""
    page = _PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    current = f"{before}{_BEGIN}\n{asyncio.run(make_table())}\n{_END}{after}"
    if "--check" in sys.argv[1:]:
        if page != current:
            sys.stderr.write(f"the table in {_PAGE.name} is not current; run: python -m tools.profile_table\n")
        return int(page != current)
    _PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
