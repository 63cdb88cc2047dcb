"""Which rank computes which row."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.backend.ranks.rounds import evened, rounds_of


@given(costs=st.lists(st.integers(1, 100), max_size=40), num_ranks=st.integers(1, 9))
def test_every_row_is_computed_once_and_all_ranks_are_busy_as_often(costs: list[int], num_ranks: int) -> None:
    """What does not count is a copy of another rank's row."""
    ranks = [rounds_of(rank, costs, num_ranks) for rank in range(num_ranks)]
    assert sorted(each.row for rounds in ranks for each in rounds if each.counts) == list(range(len(costs)))
    assert {len(rounds) for rounds in ranks} == {-(-len(costs) // num_ranks)}


@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=40), num_ranks=st.integers(2, 9))
def test_rows_of_one_round_cost_about_the_same(costs: list[int], num_ranks: int) -> None:
    """No round's cheapest row costs less than the next round's costliest."""
    rounds = list(zip(*(rounds_of(rank, costs, num_ranks) for rank in range(num_ranks)), strict=True))
    for before, after in pairwise(rounds):
        assert min(costs[each.row] for each in before) >= max(costs[each.row] for each in after)


def test_a_rank_alone_computes_rows_in_their_order() -> None:
    """As it did before there were others."""
    assert [each.row for each in rounds_of(0, [1, 3, 2], 1)] == [0, 1, 2]


def cut(num_tokens: int, max_tokens: int) -> list[int]:
    """Rows of one long run of tokens."""
    return [min(max_tokens, num_tokens - start) for start in range(0, num_tokens, max_tokens)]


@given(num_tokens=st.integers(0, 1000), max_tokens=st.integers(1, 300), num_ranks=st.integers(2, 8))
def test_rows_are_cut_so_that_every_rank_has_one_in_every_round(
    num_tokens: int, max_tokens: int, num_ranks: int
) -> None:
    """Without further rounds, and never longer than asked for."""
    widest = cut(num_tokens, max_tokens)
    rows = evened(
        num_ranks, lambda tokens: cut(num_tokens, tokens), widest, num_tokens=num_tokens, max_tokens=max_tokens
    )
    assert sum(rows) == num_tokens
    assert max(rows, default=0) <= max_tokens
    assert -(-len(rows) // num_ranks) == -(-len(widest) // num_ranks)
    num_rows = -(-len(widest) // num_ranks) * num_ranks
    assert max(rows, default=0) == (min(max_tokens, -(-num_tokens // num_rows)) if num_rows else 0)
