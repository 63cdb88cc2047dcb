"""Reports an evaluation to people: a table, and files in the run folder."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.runtime.files import replacing, write_atomically
from penstock.telemetry.json_lines import append_lines
from services.trainer.evaluation.estimators import Estimate
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.summary import Summary

RESULTS_FILE: Final = "evaluation.json"
EVALUATIONS_FILE: Final = "evaluations.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"
_HEAD = ("set", "prompts", "n", "score", "pass@n", "maj@n", "cut", "no answer", "tokens")


class SamplesFile:
    """samples.jsonl: one line for each prompt; only a line that a crash cut off is incomplete. Its methods block."""

    def __init__(self, path: Path, outcomes: Iterable[PlayedPrompt] = ()) -> None:
        """Create `path`, replacing an older file, and begin it with `outcomes`."""
        self._path = path
        with replacing(path) as file:
            file.writelines(map(_line, outcomes))

    def add(self, outcome: PlayedPrompt) -> None:
        """Append a line; call it from one thread at a time.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        append_lines(self._path, _line(outcome))


def _line(outcome: PlayedPrompt) -> bytes:
    return msgspec.json.encode(outcome) + b"\n"


def read_samples(path: Path) -> list[PlayedPrompt]:
    """Return the prompts in the file, skipping a line that a crash truncated; empty if there is no file."""
    outcomes = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.MsgspecError):
            outcomes.append(msgspec.json.decode(line, type=PlayedPrompt))
    return outcomes


def write_results(
    folder: Path, *, about: Mapping[str, Any], version: int, elapsed_s: float, summaries: Mapping[str, Summary]
) -> None:
    """Write evaluation.json, and evaluations.jsonl for `penstock view`; each file is complete or absent.

    Args:
        folder: The run folder.
        about: What was evaluated.
        version: The policy version that played.
        elapsed_s: Seconds that it took.
        summaries: Summaries by set.
    """
    content = {**about, "elapsed_s": round(elapsed_s, 1), "sets": _sets(summaries)}
    write_atomically(folder / RESULTS_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    line = evaluation_line(0, version, elapsed_s=elapsed_s, num_held_out=0, summaries=summaries)
    write_atomically(folder / EVALUATIONS_FILE, line)


def evaluation_line(
    step: int, version: int, *, elapsed_s: float, num_held_out: int, summaries: Mapping[str, Summary]
) -> bytes:
    """Return the line of evaluations.jsonl of an evaluation.

    Args:
        step: Optimizer steps taken to reach the weights.
        version: Their version.
        elapsed_s: Seconds that it took.
        num_held_out: Replicas that were held out for it.
        summaries: Summaries by set.
    """
    row = {
        "step": step,
        "policy_version": version,
        "elapsed_s": round(elapsed_s, 3),
        "num_held_out_replicas": num_held_out,
        "sets": _sets(summaries),
    }
    return (json.dumps(row) + "\n").encode()


def _sets(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    return {name: each.as_json() for name, each in summaries.items()}


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
