"""The data set of a run: an endless sequence of examples with random access.

Invariant: the example at a position depends only on the data, the seed and the position. A checkpoint therefore keeps
one integer, and each epoch plays every row exactly once. Rows whose prompt is too long keep their positions, which the
feeder passes over: another limit on prompts moves no other row.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import structlog

from penstock.errors import DataError, InvalidRequestError
from services.trainer.data.config import DataConfig
from services.trainer.data.example import Example
from services.trainer.data.geometry import GeometryDataset
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.data.readers.parquet import ParquetTable
from services.trainer.data.source import NamedTable, Source

log = structlog.get_logger()

NUM_BUILT_IN_ROWS = 10_000
"""An epoch of the built-in problems: more rows than there are different pictures of a coordinate, few enough for an
order of rows to be drawn in a millisecond."""
BUILT_IN_SEED = 0
"""The built-in problems are the same in every run, so that runs can be compared; run.seed changes their order."""
MAX_CHECKED_ROWS = 5000
"""Data sets up to this size are read completely before the run starts: about a millisecond per image, and another to
count the tokens of a prompt. Later rows of larger ones are checked when they are played."""


class Dataset:
    """Examples by position, epoch after epoch."""

    def __init__(self, source: Source, config: DataConfig, *, seed: int, limit: PromptLimit | None = None) -> None:
        """Check the first `MAX_CHECKED_ROWS` rows of files; others are checked when they are read.

        Raises:
            DataError: a row is wrong, or no prompt fits.
        """
        self._source = source
        self._seed = seed if config.shuffle else None
        self._limit = limit
        if config.path:
            self._check(min(len(source), MAX_CHECKED_ROWS))

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._source)

    def __getitem__(self, position: int) -> Example:
        """Return the example at a position, counted from 0 without end.

        Raises:
            DataError: the row is wrong.
        """
        return self._source[row_at(position, self.num_rows, self._seed)]

    def playable(self, position: int) -> Example | None:
        """Return the example at a position, or None if its prompt leaves no room for an answer.

        Raises:
            DataError: the row is wrong.
        """
        number = row_at(position, self.num_rows, self._seed)
        example = self._source[number]
        return example if self._num_tokens_over(number, example) <= 0 else None

    def _check(self, num_checked: int) -> None:
        over, num_put_first = [], 0
        for number in range(num_checked):
            example = self._source[number]
            over.append(self._num_tokens_over(number, example))
            num_put_first += example.images_put_first
        if num_put_first:
            log.info("data.images_put_first", num_rows=num_put_first, num_rows_checked=num_checked)
        num_overlong = sum(num_tokens > 0 for num_tokens in over)
        if not num_overlong or self._limit is None:
            return
        longest = max(over) + self._limit.max_tokens
        if num_overlong == self.num_rows:
            raise DataError(
                f"{self._source.name}: all {num_overlong} prompts are longer than the "
                f"{self._limit.max_tokens} tokens that leave room for an answer, the shortest of them "
                f"{min(over) + self._limit.max_tokens}; raise rollout.context_length, lower sampling.max_new_tokens, "
                "or play them with the room that is left by filters.overlong_prompts = 'keep'"
            )
        log.warning(
            "data.overlong_prompts_dropped",
            num_rows=num_overlong,
            num_rows_checked=num_checked,
            max_prompt_tokens=self._limit.max_tokens,
            longest_prompt_tokens=longest,
        )

    def _num_tokens_over(self, number: int, example: Example) -> int:
        """Return by how many tokens a row's prompt is too long; at most 0 if it fits."""
        if self._limit is None:
            return 0
        try:
            return self._limit.num_tokens(example) - self._limit.max_tokens
        except InvalidRequestError as error:
            raise self._source.wrong(number, error) from None


def open_dataset(config: DataConfig, *, seed: int = 0, limit: PromptLimit | None = None) -> Dataset:
    """Open the file at `path`, or the built-in data set if the path is empty.

    Args:
        config: Which data, and how to read it.
        seed: Seed of the order of rows, if it is shuffled. The built-in problems are always the same.
        limit: Which prompts are too long to be played; None plays all.

    Raises:
        DataError: the file, one of its columns or one of its rows is wrong, or no prompt fits.
    """
    return Dataset(
        _open_file(Path(config.path), config) if config.path else built_in(config), config, seed=seed, limit=limit
    )


def _open_file(file: Path, config: DataConfig) -> Source:
    name = f"data.path {str(file)!r}"
    return Source(name, [NamedTable(table=ParquetTable(file), name=name, folder=file.parent)], config)


def built_in(config: DataConfig, *, num_rows: int = NUM_BUILT_IN_ROWS) -> Source:
    """Return the built-in geometry problems, which are drawn when they are read."""
    name = "the built-in data set"
    table = GeometryDataset(num_rows, seed=BUILT_IN_SEED, kinds=config.kinds)
    return Source(name, [NamedTable(table=table, name=name, folder=Path())], config)


def row_at(position: int, num_rows: int, seed: int | None) -> int:
    """Return the number of the row played at `position`.

    Args:
        position: From 0; position // num_rows is the epoch.
        num_rows: Rows of an epoch.
        seed: Seed of the orders, one for each epoch; None keeps the order of the file.
    """
    epoch, place = divmod(position, num_rows)
    return place if seed is None else int(_epoch_order(num_rows, seed, epoch)[place])


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> Sequence[int] | np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
