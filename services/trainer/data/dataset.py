"""The data set of a run: an endless sequence of examples with random access.

Invariant: the example at a position depends only on the data, the seed and the position. A checkpoint therefore keeps
one integer, and each epoch plays every row exactly once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from penstock.errors import DataError, InvalidRequestError
from services.trainer.config import DataConfig
from services.trainer.data.example import Example, Row, make_example
from services.trainer.data.geometry import GeometryDataset, Kind
from services.trainer.data.parquet import ParquetRows

NUM_BUILT_IN_ROWS = 10_000
"""An epoch of the built-in problems: more rows than there are different pictures of a coordinate, few enough for an
order of rows to be drawn in a millisecond."""
BUILT_IN_SEED = 0
"""The built-in problems are the same in every run, so that runs can be compared; run.seed changes their order."""
MAX_CHECKED_ROWS = 5000
"""Data sets up to this size are read completely before the run starts: about a millisecond per image."""


class Rows(Protocol):
    """A source of rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Row:
        """Read a row; raises DataError when it is wrong."""
        ...


class Dataset:
    """Examples by position, epoch after epoch."""

    def __init__(self, rows: Rows, config: DataConfig, *, seed: int) -> None:
        """Check the first `MAX_CHECKED_ROWS` rows of a file; others are checked when they are read.

        Raises:
            DataError: a row is wrong.
        """
        self._rows = rows
        self._config = config
        self._seed = seed if config.shuffle else None
        if config.path:
            for number in range(min(len(rows), MAX_CHECKED_ROWS)):
                self._example(number)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def __getitem__(self, position: int) -> Example:
        """Return the example at a position, counted from 0 without end.

        Raises:
            DataError: the row is wrong.
        """
        return self._example(row_at(position, self.num_rows, self._seed))

    def _example(self, number: int) -> Example:
        try:
            return make_example(
                self._rows[number],
                prompt_suffix=self._config.prompt_suffix,
                system_prompt=self._config.system_prompt,
            )
        except (ValueError, InvalidRequestError) as error:
            name = self._config.path or "geometry"
            raise DataError(f"data set {name!r}, row {number}: {error}; repair the row or remove it") from None


def open_dataset(config: DataConfig, *, seed: int = 0) -> Dataset:
    """Open the file at `path`, or the built-in data set if the path is empty.

    Args:
        config: Which data, and how to read it.
        seed: Seed of the order of rows, if it is shuffled. The built-in problems are always the same.

    Raises:
        DataError: the file, one of its columns or one of its rows is wrong.
    """
    return Dataset(ParquetRows(config) if config.path else BuiltInRows(config.kinds), config, seed=seed)


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


class BuiltInRows:
    """The built-in geometry problems, drawn when they are read."""

    def __init__(self, kinds: Sequence[Kind], *, num_rows: int = NUM_BUILT_IN_ROWS) -> None:
        """Problems of these kinds."""
        self._drawn = GeometryDataset(num_rows, seed=BUILT_IN_SEED, kinds=kinds)

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, number: int, /) -> Row:
        drawn = self._drawn[number]
        return Row(
            turns=(("user", drawn["problem"]),),
            images=tuple(image["bytes"] for image in drawn["images"]),
            golds=(drawn["answer"],),
        )
