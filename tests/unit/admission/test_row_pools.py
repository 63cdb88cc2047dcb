"""Row pools: what is drawn, whatever the order in which groups arrive and however often the trainer dies."""

import json
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.errors import DataError
from services.trainer.admission.pools import Pool, Row, RowPools, pass_rate
from services.trainer.data.config import PoolConfig
from services.trainer.data.dataset import row_at

NUM_ROWS = 5
RATES = (0.0, 0.25, 0.5, 1.0, None)
NUM_POSITIONS = 60


def row_of(position: int) -> Row:
    """Five rows, in another order in each epoch."""
    return "", row_at(position, NUM_ROWS, 7)


def new_pools(easy_chance: float = 0.0, hard_chance: float = 0.0, *, num_rows: int = NUM_ROWS) -> RowPools:
    """Pools of one source."""
    return RowPools(PoolConfig(easy_chance=easy_chance, hard_chance=hard_chance), seed=3, num_rows={"": num_rows})


def in_order(rates: Sequence[float | None], pools: RowPools) -> list[bool]:
    """Which positions are played by a run that plays one group after the other."""
    played = []
    for position, rate in enumerate(rates):
        played.append(pools.draw(position, row_of(position)) is None)
        pools.end(position, rate)
    return played


class Run:
    """A trainer with several groups in play, which dies now and then; each position always has the same pass rate."""

    def __init__(self, rates: Sequence[float | None], config: PoolConfig, history: random.Random) -> None:
        """Begin with a checkpoint of the start."""
        self.rates, self.config, self.history = rates, config, history
        self.pools = RowPools(config, seed=3, num_rows={"": NUM_ROWS})
        self.next_position = 0
        self.in_play: set[int] = set()
        self.finished: set[int] = set()  # on the bus, and in no checkpoint
        self.in_hand: set[int] = set()  # finished before the trainer died, and delivered again
        self.played: dict[int, bool] = {}
        self.save()

    def run(self) -> list[bool]:
        """Draw, finish groups, save and die in any order."""
        while self.next_position < len(self.rates):
            match self.history.choice("ppppffffsd"):
                case "p":
                    self.draw()
                case "f" if self.in_play:
                    self.finish(self.history.choice(sorted(self.in_play)))
                case "s":
                    self.save()
                case "d":
                    self.die()
        return [self.played[position] for position in range(len(self.rates))]

    def draw(self) -> None:
        """The next position's; it waits while its row is played."""
        position = self.next_position
        if self.pools.is_in_play(row_of(position)):
            return
        is_in_hand = position in self.in_hand
        is_played = self.pools.draw(position, row_of(position), is_in_hand=is_in_hand) is None
        assert self.played.setdefault(position, is_played) == is_played
        self.next_position += 1
        if is_played and not is_in_hand:
            self.in_play.add(position)

    def finish(self, position: int) -> None:
        """A group arrives."""
        self.in_play.discard(position)
        self.finished.add(position)
        self.pools.end(position, self.rates[position])

    def save(self) -> None:
        """Write a checkpoint; groups in hand leave the bus with it."""
        self.finished = {position for position in self.finished if position >= self.next_position}
        self.saved = json.dumps(self.pools.state()), self.next_position, frozenset(self.in_play)

    def die(self) -> None:
        """Start again from the checkpoint; the bus delivers again, in any order, what it does not hold."""
        state, self.next_position, in_play = self.saved
        self.pools = RowPools.from_state(
            json.loads(state), self.config, seed=3, num_rows={"": NUM_ROWS}, next_position=self.next_position
        )
        self.in_play = set(in_play)
        self.in_hand = {position for position in self.finished if position >= self.next_position}
        for position in self.history.sample(sorted(self.finished), len(self.finished)):
            self.finish(position)


@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.1, 0.5, 1.0]))
def test_draws_do_not_depend_on_arrivals_or_deaths(seed: int, easy_chance: float, hard_chance: float) -> None:
    """A run plays the positions that it would play one group after the other, whenever it was killed."""
    history = random.Random(seed)
    rates = history.choices(RATES, k=NUM_POSITIONS)
    config = PoolConfig(easy_chance=easy_chance, hard_chance=hard_chance, easy_rate=0.5, hard_rate=0.25)
    expected = in_order(rates, RowPools(config, seed=3, num_rows={"": NUM_ROWS}))
    assert Run(rates, config, history).run() == expected


def draws(pools: RowPools, row: Row, positions: range, rate: float) -> Iterator[Pool | None]:
    """What becomes of one row, each play ending with the same rate."""
    for position in positions:
        yield pools.draw(position, row)
        pools.end(position, rate)


@pytest.mark.parametrize(
    ("rate", "pool"),
    [(1.0, Pool.EASY), (0.9, Pool.EASY), (0.89, None), (0.11, None), (0.1, Pool.HARD), (0.0, Pool.HARD)],
)
def test_the_pass_rate_decides_the_pool(rate: float, pool: Pool | None) -> None:
    """The bounds themselves belong to the pools."""
    config = PoolConfig(easy_rate=0.9, hard_rate=0.1, easy_chance=0, hard_chance=0)
    pools = RowPools(config, seed=3, num_rows={"": NUM_ROWS})
    assert list(draws(pools, ("", 0), range(2), rate)) == [None, pool]
    assert pools.shares() == {each: 0.2 * (each is pool) for each in Pool}


def test_a_row_leaves_its_pool_with_its_next_play() -> None:
    """A group without verdicts leaves it there."""
    pools = new_pools(0.5, 0.5)
    row, position = ("", 0), 0
    for rate, shares in ((1.0, (0.2, 0)), (None, (0.2, 0)), (0.0, (0, 0.2)), (0.5, (0, 0))):
        while pools.draw(position, row) is not None:
            position += 1
        pools.end(position, rate)
        position += 1
        assert tuple(pools.shares().values()) == shares


def test_rows_of_a_pool_are_played_with_its_probability() -> None:
    """Exactly the same plays for the same seed; others for another seed."""
    found = [
        [
            pool is None
            for pool in draws(
                RowPools(PoolConfig(easy_chance=0.25), seed=seed, num_rows={"": 9}), ("", 0), range(2000), 1.0
            )
        ]
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    assert 0.22 < sum(found[0]) / 2000 < 0.28  # three standard deviations are 0.029


def test_a_row_waits_for_its_play() -> None:
    """Its pool is not known before; other rows are drawn."""
    pools = new_pools()
    pools.draw(0, ("", 0))
    assert pools.is_in_play(("", 0))
    with pytest.raises(ValueError, match="still being played"):
        pools.draw(1, ("", 0))
    assert pools.draw(1, ("", 1)) is None
    pools.end(0, 1.0)
    assert pools.draw(2, ("", 0)) is Pool.EASY


def test_a_second_attempt_changes_no_pool() -> None:
    """The first end of a play counts, else a decision could depend on which attempt was faster."""
    pools = new_pools()
    pools.draw(0, ("", 0))
    pools.end(0, 1.0)
    pools.end(0, 0.0)
    assert pools.shares() == {Pool.EASY: 0.2, Pool.HARD: 0.0}


def test_the_first_attempt_counts_after_a_restart_too() -> None:
    """Both attempts of a position that a killed trainer had drawn come again before it is drawn."""
    pools = new_pools()
    pools.end(0, 1.0)
    pools.end(0, 0.0)
    pools.draw(0, ("", 0), is_in_hand=True)
    assert pools.shares() == {Pool.EASY: 0.2, Pool.HARD: 0.0}


def test_the_run_ends_when_no_row_can_be_played_any_more() -> None:
    """Rows that cannot be played at all count; the error says what to change."""
    pools = new_pools(num_rows=3)
    for position, rate in enumerate((1.0, 0.0)):
        pools.draw(position, ("", position))
        pools.end(position, rate)
    assert pools.draw(2, ("", 0)) is Pool.EASY, "there is a third row"
    pools.draw(3, ("", 2))
    pools.pass_over(3)
    with pytest.raises(
        DataError,
        match=r"none of the 3 rows .*: 1 in the easy pool, 1 in the hard pool, 1 wrong or too long; resume with "
        r"--data\.pools\.easy_chance or --data\.pools\.hard_chance above 0",
    ):
        pools.draw(4, ("", 1))


def test_rows_that_may_be_drawn_again_do_not_end_the_run() -> None:
    """Only a probability of 0 is for ever."""
    pools = new_pools(easy_chance=0.01, num_rows=1)
    assert Pool.EASY in set(draws(pools, ("", 0), range(50), 1.0))


def test_the_state_of_other_data_is_refused() -> None:
    """Row 3 of a file is another row in another file."""
    state = new_pools().state()
    with pytest.raises(DataError, match=r"pools of 5 rows, and the data have 4 rows of 'a', 1 rows of 'b'"):
        RowPools.from_state(state, PoolConfig(), seed=3, num_rows={"a": 4, "b": 1}, next_position=0)


def test_bounds_that_meet_are_refused() -> None:
    """A row would be in both pools."""
    with pytest.raises(ValidationError, match=r"hard_rate = 0\.5 is not below easy_rate = 0\.5"):
        PoolConfig(easy_rate=0.5, hard_rate=0.5)


def test_samples_that_nobody_judged_have_no_part_in_the_rate() -> None:
    """A sample passes from 0.5 on, as in the metrics `pass_rate_*`."""
    assert pass_rate([1.0, 0.5, 0.1, None]) == pytest.approx(2 / 3)
    assert pass_rate([None]) is None
