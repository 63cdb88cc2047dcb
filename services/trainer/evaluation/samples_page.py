"""samples.html: some prompts of an evaluation with their pictures and answers, for people to read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.errors import DataError
from penstock.runtime.files import write_atomically
from services.trainer.data.contact_sheet import Answer, Entry, render_sheet
from services.trainer.data.survey import choose_rows
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.sets import EvaluationSet

PAGE_FILE: Final = "samples.html"
ROWS_PER_SET: Final = 24
_ANSWERS_PER_ROW = 4


def write_page(
    folder: Path, title: str, sets: Mapping[str, EvaluationSet], outcomes: Mapping[str, Sequence[PlayedPrompt]]
) -> None:
    """Write samples.html with rows evenly spread over each set; the file is complete or absent. Blocking."""
    entries = [
        entry
        for name, each in sets.items()
        for outcome in _spread(outcomes.get(name, ()))
        for entry in _entries(each, outcome)
    ]
    write_atomically(folder / PAGE_FILE, render_sheet(title, entries))


def _spread(outcomes: Sequence[PlayedPrompt]) -> list[PlayedPrompt]:
    ordered = sorted(outcomes, key=lambda each: each.row)
    return [ordered[number] for number in choose_rows(ordered, ROWS_PER_SET)]


def _entries(played: EvaluationSet, outcome: PlayedPrompt) -> Sequence[Entry]:
    """Return the prompt with its answers; empty if its row can no longer be read."""
    try:
        example = played[outcome.row]
    except DataError:
        return ()
    origin = f"{outcome.set_name}, row {outcome.row}"
    if outcome.error:
        origin += f", could not be played: {outcome.error}"
    pass_score = played.config.pass_score
    answers = [_answer(sample, pass_score) for sample in outcome.samples[:_ANSWERS_PER_ROW]]
    return (Entry(origin=origin, example=example, num_tokens=None, answers=answers),)


def _answer(sample: PlayedSample, pass_score: float) -> Answer:
    facts = ["not judged" if sample.score is None else f"score {sample.score:g}"]
    if sample.extracted:
        facts.append(f"extracted {sample.extracted}")
    facts.append(f"{sample.num_tokens} tokens")
    if sample.finish_reason != "stop":
        facts.append(f"ended by {sample.finish_reason}")
    if sample.error:
        facts.append(sample.error)
    is_right = sample.score is not None and sample.score >= pass_score
    return Answer(text=sample.text, facts=" · ".join(facts), is_right=is_right)
