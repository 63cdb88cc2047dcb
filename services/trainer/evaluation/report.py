"""Reports an evaluation to people: a table, and files in the run folder."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.runtime.files import write_atomically
from services.trainer.evaluation.estimators import Estimate
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.summary import Summary

RESULTS_FILE: Final = "evaluation.json"
SAMPLES_FILE: Final = "samples.jsonl"
_HEAD = ("set", "prompts", "n", "score", "pass@n", "maj@n", "cut", "no answer", "tokens")


class SamplesFile:
    """samples.jsonl: one line for each prompt; only the last line can be incomplete."""

    def __init__(self, path: Path, outcomes: Iterable[PlayedPrompt] = ()) -> None:
        """Create `path`, replacing an older file, and begin it with `outcomes`."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.writelines(msgspec.json.encode(each) + b"\n" for each in outcomes)
        os.replace(temporary, path)
        self._file = path.open("ab")

    def add(self, outcome: PlayedPrompt) -> None:
        """Append a line."""
        self._file.write(msgspec.json.encode(outcome) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_samples(path: Path) -> list[PlayedPrompt]:
    """Return the prompts in the file, skipping a line that a crash truncated; empty if there is no file."""
    outcomes = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            outcomes.append(msgspec.json.decode(line, type=PlayedPrompt))
    return outcomes


def write_results(folder: Path, *, about: Mapping[str, Any], summaries: Mapping[str, Summary]) -> None:
    """Write evaluation.json; the file is complete or absent.

    Args:
        folder: The run folder.
        about: What was evaluated.
        summaries: Summaries by set.
    """
    content = {**about, "sets": {name: each.as_json() for name, each in summaries.items()}}
    write_atomically(folder / RESULTS_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def describe(summaries: Mapping[str, Summary]) -> list[str]:
    """Return the results as a table in lines, each set's sources below it."""
    rows = [_HEAD, *(row for name, each in summaries.items() for row in _rows(name, each))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines += [
        f"{name}: {summary.turns_mean:.2f} turns a sample"
        + "".join(f", {metric} {value:.4g}" for metric, value in summary.metrics.items())
        for name, summary in summaries.items()
        if summary.turns_mean > 1 or summary.metrics
    ]
    if failed := sum(each.num_failed_prompts for each in summaries.values()):
        lines.append(f"{failed} prompts could not be played, and are in no number; {SAMPLES_FILE} says why")
    if any(each.unjudged_fraction for each in summaries.values()):
        lines.append(f"samples that could not be judged count as 0; {SAMPLES_FILE} says why")
    return lines


def _rows(name: str, summary: Summary) -> Iterator[Sequence[str]]:
    yield _row(name, summary)
    for source, part in summary.sources.items():
        yield _row(f"  {source}", part)


def _row(name: str, summary: Summary) -> Sequence[str]:
    num_samples = summary.samples_per_prompt
    lengths = summary.tokens
    return (
        name,
        f"{summary.num_prompts:,}",
        str(num_samples),
        _shown(summary.score),
        _shown(summary.pass_at.get(num_samples)),
        _shown(summary.majority_at.get(num_samples)) if num_samples > 1 else "",
        f"{summary.truncated_fraction:.1%}",
        f"{summary.no_answer_fraction:.1%}",
        "-" if lengths is None else f"{lengths.mean:,.0f} (max {lengths.max:,})",
    )


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.3f}"
    return f"{estimate.value:.3f}{error}"
