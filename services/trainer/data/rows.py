"""The data set of a run: an endless sequence of rows with random access.

Invariant: the row at a position depends only on the data, the seed and the position. So the place in the data that a
checkpoint must keep is one integer, and each epoch plays every row exactly once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from penstock.errors import DataError, InvalidRequestError
from services.trainer.config import DataConfig
from services.trainer.data.geometry import GeometryDataset
from services.trainer.data.parquet import ParquetProblems
from services.trainer.data.problem import Problem, PromptContent, make_content

MAX_CHECKED_ROWS = 5000
"""Data sets up to this size are read once, entirely, before the run starts: about a millisecond per picture."""

__all__ = ["Dataset", "PromptContent", "open_dataset", "row_at"]


class Problems(Protocol):
    """Where problems come from."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, row: int, /) -> Problem:
        """Read a row; raises DataError when it is wrong."""
        ...


class Dataset:
    """Rows by position, epoch after epoch."""

    def __init__(self, problems: Problems, config: DataConfig, *, seed: int) -> None:
        """Check what can be checked now.

        Raises:
            DataError: a row is wrong. Of a large data set only the first rows are read here; the others when they are
                asked for, and so before anything is trained on them.
        """
        self._problems = problems
        self._config = config
        self._seed = seed if config.shuffle else None
        if config.path:
            for row in range(min(len(problems), MAX_CHECKED_ROWS)):
                self._row(row)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._problems)

    def __getitem__(self, position: int) -> PromptContent:
        """Return what a prompt takes from the row at a position; positions go from 0, without end.

        Raises:
            DataError: the row is wrong.
        """
        return self._row(row_at(position, self.num_rows, self._seed))

    def _row(self, row: int) -> PromptContent:
        try:
            return make_content(
                self._problems[row],
                prompt_suffix=self._config.prompt_suffix,
                system_prompt=self._config.system_prompt,
            )
        except (ValueError, InvalidRequestError) as error:
            name = self._config.path or self._config.name
            raise DataError(f"data set {name!r}, row {row}: {error}; repair the row or remove it") from None


def open_dataset(config: DataConfig, *, seed: int = 0) -> Dataset:
    """Open the file at `path`, or the built-in data set where it is empty.

    Args:
        config: Which data, and how to read it.
        seed: Of the order of rows, if it is shuffled. What the built-in problems are depends on `config.seed` alone.

    Raises:
        DataError: the file, a column of it or a row of it is wrong.
    """
    return Dataset(ParquetProblems(config) if config.path else _BuiltIn(config), config, seed=seed)


def row_at(position: int, num_rows: int, seed: int | None) -> int:
    """Return which row is played at `position`.

    Args:
        position: From 0; position // num_rows is the epoch.
        num_rows: Rows of an epoch.
        seed: Of the order, another one in each epoch. None: the order of the rows.
    """
    epoch, place = divmod(position, num_rows)
    return place if seed is None else int(_epoch_order(num_rows, seed, epoch)[place])


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> Sequence[int] | np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


class _BuiltIn:
    """The built-in geometry problems, drawn when they are read."""

    def __init__(self, config: DataConfig) -> None:
        self._rows = GeometryDataset(config.size, seed=config.seed, kinds=config.kinds)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> Problem:
        drawn = self._rows[row]
        return Problem(
            turns=(("user", drawn["problem"]),),
            images=tuple(image["bytes"] for image in drawn["images"]),
            golds=(drawn["answer"],),
        )
