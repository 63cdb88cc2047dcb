"""Reads the folder of a finished run: steps, evaluations, validations, and what it was made with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.results.running import MADE_FILE

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run."""

    rows: list[Row]
    """Rows of metrics.jsonl, one for each optimizer step."""
    evaluations: list[Row] = field(default_factory=list)
    validations: list[Row] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)

    def evaluation(self, step: int) -> Row:
        """Return the results of the evaluation after `step` steps, by set.

        Raises:
            LookupError: there is none, or some of its prompts failed, so that it does not cover the whole set.
        """
        found = [row["sets"] for row in self.evaluations if row["step"] == step]
        if not found:
            raise LookupError(f"no evaluation of step {step}; is there one of {[r['step'] for r in self.evaluations]}")
        (sets,) = found
        failed = {name: of["num_failed_prompts"] for name, of in sets.items() if of["num_failed_prompts"]}
        if failed:
            raise LookupError(f"the evaluation of step {step} lacks prompts that failed: {failed}; run it again")
        return dict(sets)

    def first_and_last_evaluation(self) -> tuple[Row, Row]:
        """Return the evaluations before the first and after the last step, by set."""
        return self.evaluation(0), self.evaluation(self.rows[-1]["step"])


def read_run(folder: Path) -> Run:
    """Read the run in `folder`; files that its command does not write count as empty."""
    return Run(
        rows=_lines(folder / "metrics.jsonl"),
        evaluations=_lines(folder / "evaluations.jsonl"),
        validations=_lines(folder / "validation.jsonl"),
        made=json.loads((folder / MADE_FILE).read_text()),
    )


def _lines(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
