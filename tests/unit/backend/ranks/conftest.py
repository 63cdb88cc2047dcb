"""Ranks that the tests of a module share: to start them takes seconds."""

from collections.abc import Iterator

import pytest

from tests.support.trainer.ranks.rank_pool import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    with RankPool(4) as pool:
        yield pool
