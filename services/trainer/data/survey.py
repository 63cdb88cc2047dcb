"""Surveys a source row by row: which rows would be played, which would not, and why."""

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import DataError, InvalidRequestError
from penstock.model.images import read_sizes
from services.trainer.data.lengths import UNKNOWN, Lengths
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.source import Rows, Source

MAX_SHOWN = 8
"""Number of invalid rows whose reason is kept."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """Findings in the rows of a source that were read."""

    num_rows: int
    """Rows of the source."""
    num_read: int = 0
    num_wrong: int = 0
    """Rows that training would reject."""
    num_unfit: int = 0
    """Those of them that do not fit other settings; training rejects them even where it drops wrong rows."""
    reasons: list[str] = field(default_factory=list)
    """Why the first `MAX_SHOWN` of them would be rejected."""
    num_overlong: int = 0
    """Rows whose prompt is longer than the limit, which training passes over."""
    num_kept: int = 0
    """Rows whose prompt is longer than the limit, which training plays all the same."""
    num_images_put_first: int = 0
    images_per_row: Counter[int] = field(default_factory=Counter)
    """Number of rows by number of images."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Width and height of every image."""
    num_tokens: list[int] = field(default_factory=list)
    """Tokens of each valid row's prompt, images expanded; empty without a limit."""
    num_learned: list[int] = field(default_factory=list)
    """Learned tokens of each valid row that is short enough; empty for prompts, which have none."""
    profiles: Counter[str] = field(default_factory=Counter)
    environments: Counter[str] = field(default_factory=Counter)

    def percentile(self, share: float) -> int:
        """Return the number of tokens that a share of the prompts does not exceed."""
        return int(np.percentile(self.num_tokens, 100 * share, method="higher"))


def survey(
    rows: Rows,
    source: Source,
    lengths: Lengths,
    limit: PromptLimit | None,
    *,
    require: Callable[[Example], None] | None = None,
    max_rows: int | None = None,
    on_row: Callable[[], object] = lambda: None,
) -> Survey:
    """Read rows, and keep the lengths of their prompts.

    Args:
        rows: The rows of `source` that are used.
        source: Where they are from.
        lengths: Receives the measured lengths.
        limit: Decides which prompts are too long; None measures none.
        require: Raises ValueError for a row that does not fit other settings; None: all fit.
        max_rows: Read this many from the start; None reads all.
        on_row: Called after each row.
    """
    found = Survey(num_rows=len(rows))
    try:
        for number in range(len(rows) if max_rows is None else min(max_rows, len(rows))):
            try:
                example = rows[number]
                num_tokens = _measure(source, number, example, lengths, limit)
                num_learned = 0 if limit is None else limit.num_learned(example)
            except DataError as error:
                _reject(found, error)
            else:
                try:
                    if require is not None:
                        require(example)
                except ValueError as error:
                    _reject(found, source.wrong(number, error))
                    found.num_unfit += 1
                _count(found, example)
                if limit is not None:
                    found.num_tokens.append(num_tokens)
                    budget = example.limits.max_tokens
                    is_overlong = num_tokens > limit.played(budget)
                    found.num_overlong += is_overlong
                    found.num_kept += num_tokens > limit.room(budget) and not is_overlong
                    if num_learned and not is_overlong:
                        found.num_learned.append(num_learned)
            found.num_read += 1
            on_row()
    finally:
        lengths.save()  # measuring takes long, and a person may interrupt it
    return found


def choose_rows(source: Sized, num_rows: int) -> Sequence[int]:
    """Return `num_rows` row numbers, evenly spread over a source, or fewer if it has no more."""
    return [int(number) for number in np.linspace(0, len(source) - 1, min(num_rows, len(source))).round()]


def _reject(found: Survey, error: DataError) -> None:
    found.num_wrong += 1
    if len(found.reasons) < MAX_SHOWN:
        found.reasons.append(str(error))


def _measure(source: Source, number: int, example: Example, lengths: Lengths, limit: PromptLimit | None) -> int:
    if lengths.num_tokens[number] == UNKNOWN:
        try:
            lengths.add(number, example, 0 if limit is None else limit.num_tokens(example))
        except InvalidRequestError as error:
            raise source.wrong(number, error) from None
    return int(lengths.num_tokens[number])


def _count(found: Survey, example: Example) -> None:
    found.num_images_put_first += example.images_put_first
    found.images_per_row[len(example.images)] += 1
    found.sizes += read_sizes(example.images)
    found.profiles[example.profile] += 1
    found.environments[example.environment] += 1
