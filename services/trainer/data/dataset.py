"""The data set of a run: an endless sequence of examples with random access.

Invariant: the example at a position depends only on the data, the settings, the seed and the position. A checkpoint
therefore keeps one integer, and each epoch of a source plays every row exactly once. A row does not come back at once
where an epoch ends: a third of its source's rows come in between. Rows whose prompt is too long keep their positions,
which the feeder passes over: a different limit on prompts moves no other row.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import structlog

from penstock.errors import DataError, InvalidRequestError
from services.trainer.admission.filters import FilterReason
from services.trainer.data.config import DataConfig
from services.trainer.data.lengths import UNKNOWN, Lengths
from services.trainer.data.mixture import Mixture
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.data.recent_examples import RecentExamples
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.opening import cache_folder, open_sources
from services.trainer.data.sources.source import PROMPTS, RowForm, Source

log = structlog.get_logger()

MAX_CHECKED_ROWS: Final = 5000
"""Rows of each source that are read before the run starts: about 1 ms per image, and 1 ms to count the tokens of a
prompt. Later rows are checked when they are played, unless `penstock data` has checked them."""
_PROGRESS_EVERY_S = 10.0

Progress: TypeAlias = Callable[[str, int, int], None]
"""Callback that takes the source, its number of rows checked so far, and its number of rows to check."""


class Dataset:
    """Examples by position, epoch after epoch."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        config: DataConfig,
        *,
        seed: int,
        limit: PromptLimit | None = None,
        lengths: Mapping[str, Lengths] | None = None,
    ) -> None:
        """Mix sources; `check` reads their first rows.

        Args:
            sources: Sources by name.
            config: Their weights, and whether rows are shuffled.
            seed: Seed of the orders.
            limit: Decides which prompts are too long to be played; None plays all.
            lengths: Known prompt lengths by source; None: nothing is known.

        Raises:
            ConfigError: a source's share is too small.
        """
        self.sources = dict(sources)
        self.lengths = lengths or {name: Lengths(len(source)) for name, source in sources.items()}
        self._names = list(sources)
        self._mixture = Mixture({name: config.weight(name) for name in sources}, seed=seed)
        self._seed = seed if config.shuffle else None
        self._drops_wrong = config.wrong_rows == "drop"
        self._num_wrong: dict[str, int] = {}
        self._limit = limit
        self._recent = RecentExamples()

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self.sources.values()))

    def __getitem__(self, position: int) -> Example:
        """Return the example at a position, counted from 0 without end.

        Raises:
            DataError: the row is invalid.
        """
        name, number = self.row_at(position)
        return self._recent.read(name, number, self.sources[name].__getitem__)

    def row_at(self, position: int) -> tuple[str, int]:
        """Return the source at a position, and the number of the row in it."""
        source, index = self._mixture.at(position)
        name = self._names[source]
        return name, row_at(index, len(self.sources[name]), self._seed, source=name)

    def playable(self, position: int) -> Example | FilterReason:
        """Return the example at a position, or why it is passed over.

        A prompt is too long if it leaves no room for an answer, in the context or in its own token limit, unless the
        limit keeps it.

        Raises:
            DataError: the row is invalid, and `wrong_rows` is refuse.
        """
        name, number = self.row_at(position)
        limit, known = self._limit, self.lengths[name]
        if limit is not None and known.num_tokens[number] > limit.played(known.budget(number)):
            return FilterReason.OVERLONG_PROMPT
        try:
            example = self._recent.read(name, number, self.sources[name].__getitem__)
            num_tokens = self._count(name, number, example)
        except DataError as error:
            return self._drop(error)
        if limit is None or num_tokens <= limit.played(example.limits.max_tokens):
            return example
        return FilterReason.OVERLONG_PROMPT

    def drop_unsendable(self, position: int, error: InvalidRequestError) -> FilterReason:
        """Return why the row at a position, which was read but cannot be sent, is passed over.

        Raises:
            DataError: `wrong_rows` is refuse; the message names the row's file and its place there.
        """
        name, number = self.row_at(position)
        return self._drop(self.sources[name].wrong(number, error))

    def _drop(self, error: DataError) -> FilterReason:
        if not self._drops_wrong:
            raise error from None
        log.warning("data.wrong_row_dropped", reason=str(error))
        return FilterReason.WRONG_ROW

    def num_passed_over(self) -> int:
        """Return the number of rows of all sources that are known to be too long."""
        limit = self._limit
        if limit is None:
            return 0
        return sum(int(known.is_overlong(limit.played).sum()) for known in self.lengths.values())

    def num_wrong(self) -> int:
        """Return the number of rows of all sources that `check` found wrong, where these are dropped."""
        return sum(self._num_wrong.values())

    def check(self, *, max_rows: int = MAX_CHECKED_ROWS, on_progress: Progress | None = None) -> None:
        """Read those of each source's first rows that are not known yet, and count the tokens of their prompts.

        Raises:
            DataError: a row is invalid and `wrong_rows` is refuse, or no prompt of a source can be played.
        """
        for name, source in self.sources.items():
            if not source.config.paths:
                continue  # built-in problems always fit
            known, num_checked = self.lengths[name], min(len(source), max_rows)
            unknown = np.flatnonzero(known.num_tokens[:num_checked] == UNKNOWN)
            wrong: list[str] = []
            for done, number in enumerate(map(int, unknown)):
                try:
                    example = source[number]
                    known.add(number, example, self._count(name, number, example))
                except DataError as error:
                    if not self._drops_wrong:
                        raise
                    wrong.append(str(error))
                if on_progress is not None:
                    on_progress(name, done + 1, len(unknown))
            if len(unknown):
                known.save()
            self._num_wrong[name] = len(wrong)
            self._report_wrong(source, wrong, num_checked)
            self._report(source, known, num_checked)

    def _report_wrong(self, source: Source, wrong: Sequence[str], num_checked: int) -> None:
        if len(wrong) == len(source):
            raise DataError(f"{source.name}: all {len(wrong)} rows are wrong; the first: {wrong[0]}")
        if wrong:
            log.warning(
                "data.wrong_rows_dropped",
                source=source.name,
                num_rows=len(wrong),
                num_rows_checked=num_checked,
                first=wrong[0],
            )

    def _report(self, source: Source, known: Lengths, num_checked: int) -> None:
        if num_put_first := int(known.images_put_first[:num_checked].sum()):
            log.info("data.images_put_first", source=source.name, num_rows=num_put_first, num_rows_checked=num_checked)
        if self._limit is None:
            return
        checked, budget = known.num_tokens[:num_checked], source.budget
        num_overlong, num_dropped = (
            int(known.is_overlong(most)[:num_checked].sum()) for most in (self._limit.room, self._limit.played)
        )
        if num_dropped == len(source):
            refusal = self._limit.refusal(num_rows=num_dropped, shortest=int(checked.min()), budget=budget)
            raise DataError(f"{source.name}: {refusal}")
        facts = {"source": source.name, "num_rows_checked": num_checked, "longest_prompt_tokens": int(checked.max())}
        if num_dropped:
            most = self._limit.played(budget)
            log.warning("data.overlong_prompts_dropped", num_rows=num_dropped, max_prompt_tokens=most, **facts)
        if num_kept := num_overlong - num_dropped:
            most = self._limit.room(budget)
            log.warning("data.overlong_prompts_kept", num_rows=num_kept, max_prompt_tokens=most, **facts)

    def _count(self, name: str, number: int, example: Example) -> int:
        """Return the tokens of a row's prompt; 0 if there is no limit, because the length is then unused."""
        try:
            return 0 if self._limit is None else self._limit.num_tokens(example)
        except InvalidRequestError as error:
            raise self.sources[name].wrong(number, error) from None


def open_dataset(
    config: DataConfig, *, seed: int = 0, limit: PromptLimit | None = None, form: RowForm = PROMPTS
) -> Dataset:
    """Open the sources of a run, or the built-in data set if there is none, and check their first rows.

    Args:
        config: Which data, and how to read it.
        seed: Seed of the order of rows, if it is shuffled. The built-in problems are always the same.
        limit: Decides which prompts are too long to be played; None plays all.
        form: What rows are read as: prompts or demonstrations.

    Raises:
        ConfigError: a source's share of the prompts is too small, or a file does not exist.
        DataError: a file, one of its columns or one of its rows is invalid, or no prompt fits.
        UnavailableError: the Hugging Face Hub cannot be reached, and its cache has no copy.
    """
    sources = open_sources(config, form=form)
    dataset = Dataset(
        sources, config, seed=seed, limit=limit, lengths=open_lengths(sources, cache_folder(config), limit)
    )
    dataset.check(on_progress=_logged())
    return dataset


def open_lengths(sources: Mapping[str, Source], folder: Path, limit: PromptLimit | None) -> dict[str, Lengths]:
    """Return the known prompt lengths of each source."""
    model = "" if limit is None else limit.model
    return {
        name: Lengths.open(source, folder, model) if source.config.paths else Lengths(len(source))
        for name, source in sources.items()
    }


def row_at(position: int, num_rows: int, seed: int | None, *, source: str = "") -> int:
    """Return the number of the row played at `position`.

    Args:
        position: From 0; position // num_rows is the epoch.
        num_rows: Rows of an epoch.
        seed: Seed of the orders, one for each epoch; None keeps the order of the file.
        source: Name of the source; each source has its own orders.
    """
    epoch, index = divmod(position, num_rows)
    return index if seed is None else int(_epoch_order(num_rows, seed, epoch, source)[index])


@lru_cache(maxsize=16)
def _epoch_order(num_rows: int, seed: int, epoch: int, source: str) -> np.ndarray:
    """Return the rows of an epoch in order: shuffled, but none from the last third of the epoch before in its first.

    Such rows change places with others from the middle third. The last third stays as it was shuffled, so an order
    depends on one epoch before it, not on all of them.
    """
    rng = _random_numbers(seed, epoch, source)
    order, third = rng.permutation(num_rows), num_rows // 3
    if epoch == 0:
        return order
    is_recent = np.zeros(num_rows, dtype=bool)
    is_recent[_random_numbers(seed, epoch - 1, source).permutation(num_rows)[num_rows - third :]] = True
    early = np.flatnonzero(is_recent[order[:third]])
    places = third + np.flatnonzero(~is_recent[order[third : num_rows - third]])
    later = rng.choice(places, len(early), replace=False)
    order[early], order[later] = order[later], order[early]
    return order


def _random_numbers(seed: int, epoch: int, source: str) -> np.random.Generator:
    key = (seed, epoch, zlib.crc32(source.encode())) if source else (seed, epoch)
    return np.random.default_rng(key)


def _logged() -> Progress:
    """Return a callback that logs progress every few seconds."""
    last = time.monotonic()

    def log_progress(source: str, num_done: int, num_rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_EVERY_S:
            last = time.monotonic()
            log.info("data.checking", source=source, num_rows_checked=num_done, num_rows=num_rows)

    return log_progress
