"""Ranks that the tests of this folder share: to start them takes seconds."""

from collections.abc import Iterator

import pytest

from tests.support.trainer.ranks.rank_pool import RankPool


@pytest.fixture(scope="package")
def two() -> Iterator[RankPool]:
    """Two ranks."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    with RankPool(4) as pool:
        yield pool
