"""Items and pairs that are stored beside a checkout, if they are there. A clone lacks them, and the report says so."""

from pathlib import Path

from bench.reward.report import Report
from penstock.testing.hostile_answers import HostileItem, generated_items, stored_items

STORED = Path(__file__).parents[3] / "shared" / "reward"


def hostile_items(report: Report) -> list[HostileItem]:
    """Return the stored and the generated items that hang or bloat verifiers; report how many of each there are."""
    stored, generated = stored_items(STORED / "hostile.jsonl"), generated_items()
    missing = "" if stored else f", because {STORED / 'hostile.jsonl'} is missing"
    report.note(f"hostile items: {len(generated)} generated and {len(stored)} stored{missing}")
    return [*stored, *generated]


def stored_pairs(report: Report) -> list[Path]:
    """Return the file of stored pairs; none if it is missing, which is reported."""
    pairs = STORED / "pairs.jsonl"
    if pairs.is_file():
        return [pairs]
    report.note(f"stored pairs are not measured, because {pairs} is missing")
    return []
