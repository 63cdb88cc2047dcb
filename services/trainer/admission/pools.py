"""Pools of rows by pass rate: rows that the policy always or never solves are played less often. Pure.

The pass rate at a row's last play decides its pool. When a row of the easy or the hard pool comes up again, it is
played with the pool's probability; otherwise its position is passed over, and the next one takes its place.

The row that comes up (`Dataset.row_at`) and the number that is compared with the probability are pure functions of seed
and position. The pool of each row and the rows in play are state, kept in the checkpoint.

Invariant: whether a position is played depends on the settings, the seed, and the pass rates of the same row at earlier
positions. The order in which groups arrive changes nothing, because a row is not drawn while it is still being played
(`is_in_play`). A resumed trainer therefore decides as the killed one did, as long as the samples are the same. Only the
first end of a play counts: a stale group that is played again does not change its row's pool again.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

import numpy as np

from penstock.errors import DataError
from services.trainer.algorithm.metrics.samples import PASSED_REWARD
from services.trainer.data.config import PoolConfig

Row: TypeAlias = tuple[str, int]
"""Name of a source, and number of a row in it."""

_STREAM: Final = 2
"""Separates these random numbers from the mixture's, which have the same seed."""


class Pool(enum.StrEnum):
    """A pool of rows; rows in neither pool are always played."""

    EASY = "easy"
    """Rows that the policy solves."""
    HARD = "hard"
    """Rows that the policy does not solve."""


class RowPools:
    """The pools of a run."""

    def __init__(self, config: PoolConfig, *, seed: int, num_rows: Mapping[str, int], next_position: int = 0) -> None:
        """Start with empty pools.

        Args:
            config: The pools' bounds and probabilities.
            seed: Seed of the draws.
            num_rows: Rows of each source.
            next_position: The first position that has not been drawn.
        """
        self._config = config
        self._seed = seed
        self._num_rows = dict(num_rows)
        self._next_position = next_position
        self._chances = {Pool.EASY: config.easy_chance, Pool.HARD: config.hard_chance}
        self._members: dict[Pool, set[Row]] = {pool: set() for pool in Pool}
        self._in_play: dict[Row, int] = {}  # row -> position
        self._unplayable: set[Row] = set()  # in no pool, and in no checkpoint: the next draw finds it again
        # Ends at positions that are not drawn yet come from a trainer that died after its last checkpoint.
        self._early: dict[int, float | None] = {}

    def is_in_play(self, row: Row) -> bool:
        """Return whether the row is still being played, so that it cannot be drawn."""
        return row in self._in_play

    def draw(self, position: int, row: Row, *, is_in_hand: bool = False) -> Pool | None:
        """Decide whether the row at a position is played. Each position is drawn once, in order.

        Args:
            position: Position to draw.
            row: Row at that position.
            is_in_hand: Whether a trainer that died has already played the position.

        Returns:
            The pool because of which the row is passed over; None if it is played, until `end` is called.

        Raises:
            DataError: no row can ever be played again.
            ValueError: the row is still being played.
        """
        if self.is_in_play(row):
            raise ValueError(f"row {row} is still being played, so position {position} must wait")
        self._next_position = position + 1
        pool = self._pool(row)
        if pool is not None and not is_in_hand and self._number(position) >= self._chances[pool]:
            self._require_playable_rows()
            return pool
        self._in_play[row] = position
        if is_in_hand:
            self.end(position, self._early.get(position))
        self._early.pop(position, None)
        return None

    def end(self, position: int, rate: float | None) -> None:
        """Put the row that is played at a position into the pool of its pass rate.

        Args:
            position: Position of the play.
            rate: See `pass_rate`; None (nothing was judged, or the group failed) leaves the row in its pool.
        """
        if position >= self._next_position:
            self._early.setdefault(position, rate)
        elif (row := self._leave_play(position)) is not None and rate is not None:
            self._unplayable.discard(row)
            for pool, is_member in (
                (Pool.EASY, rate >= self._config.easy_rate),
                (Pool.HARD, rate <= self._config.hard_rate),
            ):
                (self._members[pool].add if is_member else self._members[pool].discard)(row)

    def pass_over(self, position: int) -> None:
        """Record that the row drawn at a position can never be played: it is invalid, or its prompt is too long."""
        if (row := self._leave_play(position)) is not None:
            self._unplayable.add(row)
            for rows in self._members.values():
                rows.discard(row)

    def shares(self) -> dict[Pool, float]:
        """Return the share of all rows that each pool holds."""
        return {pool: len(rows) / sum(self._num_rows.values()) for pool, rows in self._members.items()}

    def state(self) -> dict[str, Any]:
        """Return the current state, as plain data for JSON."""
        pools: dict[str, dict[str, list[int]]] = {pool: {} for pool in Pool}
        for pool, rows in self._members.items():
            for source, number in sorted(rows):
                pools[pool].setdefault(source, []).append(number)
        in_play = [[position, *row] for row, position in self._in_play.items()]
        return {"num_rows": dict(self._num_rows), "pools": pools, "in_play": sorted(in_play)}

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        config: PoolConfig,
        *,
        seed: int,
        num_rows: Mapping[str, int],
        next_position: int,
    ) -> Self:
        """Restore a checkpoint's state. The bounds and probabilities may differ: they apply from the next draw on.

        Raises:
            DataError: the number of rows of a source differs.
        """
        if state["num_rows"] != dict(num_rows):
            raise DataError(
                f"the checkpoint has pools of {_counted(state['num_rows'])}, and the data have {_counted(num_rows)}; "
                "give the data that the run began with, or leave its pools with --data.pools.easy_chance=1 and "
                "--data.pools.hard_chance=1"
            )
        pools = cls(config, seed=seed, num_rows=num_rows, next_position=next_position)
        for name, by_source in state["pools"].items():
            pools._members[Pool(name)] = {(source, number) for source in by_source for number in by_source[source]}
        pools._in_play = {(source, number): position for position, source, number in state["in_play"]}
        return pools

    def _leave_play(self, position: int) -> Row | None:
        row = next((row for row, at in self._in_play.items() if at == position), None)
        if row is not None:
            del self._in_play[row]
        return row

    def _pool(self, row: Row) -> Pool | None:
        return next((pool for pool, rows in self._members.items() if row in rows), None)

    def _number(self, position: int) -> float:
        """Return the position's random number in [0, 1)."""
        return float(np.random.default_rng((self._seed, position, _STREAM)).random())

    def _require_playable_rows(self) -> None:
        never = {pool: rows for pool, rows in self._members.items() if rows and not self._chances[pool]}
        num_rows = sum(self._num_rows.values())
        if len(self._unplayable) + sum(map(len, never.values())) < num_rows:
            return
        found = ", ".join(f"{len(rows)} in the {pool} pool" for pool, rows in never.items())
        raise DataError(
            f"none of the {num_rows} rows is played any more: {found}, {len(self._unplayable)} wrong or too long;"
            f" resume with {' or '.join(f'--data.pools.{pool}_chance' for pool in never)} above 0, or give other data"
        )


def pass_rate(rewards: Sequence[float | None]) -> float | None:
    """Return the share of a group's judged samples that pass; None if none was judged."""
    judged = [reward for reward in rewards if reward is not None]
    return sum(reward >= PASSED_REWARD for reward in judged) / len(judged) if judged else None


def _counted(num_rows: Mapping[str, int]) -> str:
    return ", ".join(
        f"{number} rows of {source!r}" if source else f"{number} rows" for source, number in num_rows.items()
    )
