"""Reads the rows of a run before any of its processes starts, so that no engine is started for a row that the trainer
would refuse.

Rows are read as the trainer reads them, images decoded, but no tokens are counted: that takes a tokenizer, and torch
with it, which this process does without. Rows that a start has read are not read again while the files, the settings
and their selection are the same; `data.lengths` keeps which ones they are.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from penstock.errors import DataError
from services.launch.checks.known_names import KnownNames
from services.launch.checks.row_progress import RowProgress, open_row_progress
from services.recipe import Recipe
from services.trainer.data.dataset import MAX_CHECKED_ROWS
from services.trainer.data.lengths import UNKNOWN, Lengths, model_digest
from services.trainer.data.named_section import named_section
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.opening import cache_folder, open_sources
from services.trainer.data.sources.source import DEMONSTRATIONS, Rows, Source
from services.trainer.evaluation.set_files import named_set
from services.trainer.evaluation.sets import EvaluationSet, open_sets

MAX_S: Final = 60.0
"""Seconds for which the rows of all sources and sets are read. The trainer reads the others at its start."""
_MODEL_WITHOUT_TOKENS: Final = ""
"""In place of a model's digest: these rows were read, and their prompts were not measured."""


_Require: TypeAlias = Callable[[int, Example], None]
"""Refuses a row, by its number, that does not fit the run's other settings."""


def check_rows(
    recipe: Recipe,
    *,
    with_sets: bool,
    say: Callable[[str], object],
    max_rows: int = MAX_CHECKED_ROWS,
    max_s: float = MAX_S,
) -> None:
    """Open the data of a run and read the first rows of each source, of the demonstrations and of the evaluation sets.

    Args:
        recipe: The run's recipe, with its model.
        with_sets: Whether the run plays its evaluation sets.
        say: Receives lines for the person who waits: progress, and which rows were left unread.
        max_rows: Most rows of each source and set.
        max_s: Seconds after which no further row is read.

    Raises:
        ConfigError: an evaluation set has too few rows.
        DataError: a file cannot be read, has no rows, lacks a column, or has a row that the run would refuse.
        UnavailableError: the Hub cannot be reached and its cache has no copy.
    """
    prompts = open_sources(recipe.data)  # everything is opened first, because that takes no time
    demonstrations = {}
    if recipe.demonstrations is not None:
        with named_section("demonstrations"):
            demonstrations = open_sources(recipe.demonstrations, form=DEMONSTRATIONS)
    sets = open_sets(recipe.evaluation, recipe.data, reads_rows=False) if with_sets else {}

    for each in sets.values():
        each.check(max_rows=1)
    known = KnownNames.of(recipe)

    def fits_set(each: EvaluationSet, number: int, example: Example) -> None:
        with named_set(each.name):
            _require_known(each.source, known, number, example)

    model = "" if recipe.model is None else model_digest(recipe.model.path)
    folder, drops_wrong = cache_folder(recipe.data), recipe.data.wrong_rows == "drop"
    with open_row_progress(say) as progress:
        reader = _Reader(model, say=say, progress=progress, max_rows=max_rows, ends_at=time.monotonic() + max_s)
        for source in prompts.values():
            require = partial(_require_known, source, known)
            rows = RowsOfRun(source, max_new_tokens=recipe.sampling.max_new_tokens)
            reader.read(rows, source, source.name, folder, drops_wrong=drops_wrong, require=require)
        if recipe.demonstrations is not None:
            own_folder, drops_wrong = cache_folder(recipe.demonstrations), recipe.demonstrations.wrong_rows == "drop"
            for source in demonstrations.values():
                with named_section("demonstrations"):
                    reader.read(source, source, f"demonstrations: {source.name}", own_folder, drops_wrong=drops_wrong)
        for each in sets.values():  # their own errors name them
            name = f"evaluation.sets.{each.name}: {each.source.name}"
            reader.read(each, each.source, name, folder, require=partial(fits_set, each))


class RowsOfRun:
    """A source's prompts, of which those that ask for more new tokens than the run allows are wrong."""

    def __init__(self, source: Source, *, max_new_tokens: int) -> None:
        """Read from `source`; `max_new_tokens` is `sampling.max_new_tokens`."""
        self._source = source
        self._most = max_new_tokens

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int, /) -> Example:
        """Read a row.

        Raises:
            DataError: it is invalid, or asks for too many tokens.
        """
        example, most = self._source[number], self._most
        if (wanted := example.max_new_tokens) is not None and wanted > most:
            reason = f"its max_new_tokens = {wanted} is above sampling.max_new_tokens = {most}; raise the setting"
            raise self._source.wrong(number, ValueError(reason))
        return example


class _Reader:
    """Reads rows that no start has read, until the time is over."""

    def __init__(
        self, model: str, *, say: Callable[[str], object], progress: RowProgress, max_rows: int, ends_at: float
    ) -> None:
        self._model = model
        self._say = say
        self._progress = progress
        self._max_rows = max_rows
        self._ends_at = ends_at

    def read(
        self,
        rows: Rows,
        source: Source,
        name: str,
        folder: Path,
        *,
        drops_wrong: bool = False,
        require: _Require | None = None,
    ) -> None:
        """Read the first rows, and keep which ones were read.

        Args:
            rows: The rows of `source` that are used.
            source: Where they are from.
            name: What they are called in lines for a person.
            folder: Keeps which ones were read.
            drops_wrong: Whether wrong rows are passed over.
            require: Refuses a row, whether wrong rows are passed over or not; None: all that can be read are fine.

        Raises:
            DataError: a row is wrong and not passed over, all are, or `require` refuses one.
        """
        if not source.config.paths:
            return  # the built-in problems
        num_checked = min(len(rows), self._max_rows)
        known, unread = self._unread(source, folder, num_checked)
        num_read, num_wrong = 0, 0
        for number in unread:
            if time.monotonic() > self._ends_at:
                break
            try:
                example = rows[number]
            except DataError:
                num_wrong += 1
                if not drops_wrong or num_wrong == len(source):
                    raise
            else:
                if require is not None:
                    require(number, example)
                known.add(number, example, 0)
            num_read += 1
            self._progress.show(name, num_read, len(unread))
        if num_read:
            known.save()
        if num_left := len(rows) - num_checked + len(unread) - num_read:
            self._say(
                f"{name}: {num_left} of {len(rows)} rows are not read before the start, but when they are needed; "
                "`penstock data` reads all"
            )

    def _unread(self, source: Source, folder: Path, num_checked: int) -> tuple[Lengths, Sequence[int]]:
        """Return what is known of a source, and which of its first rows have not been read."""
        known = Lengths.open(source, folder, _MODEL_WITHOUT_TOKENS)
        config = source.config
        if config.sampling_column or config.profile_column or config.environment_column:
            return known, range(num_checked)  # whether such a row is right depends on settings outside of [data]
        measured = Lengths.open(source, folder, self._model)
        is_unread = (known.num_tokens == UNKNOWN) & (measured.num_tokens == UNKNOWN)
        return known, [int(number) for number in np.flatnonzero(is_unread[:num_checked])]


def _require_known(source: Source, known: KnownNames, number: int, example: Example) -> None:
    try:
        known.require(example)
    except ValueError as error:
        raise source.wrong(number, error) from None
