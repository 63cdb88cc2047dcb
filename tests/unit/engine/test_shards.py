"""What each process of a tensor-parallel engine holds of a parameter, and that all shards are the parameter."""

from collections.abc import Iterator

import pytest
import torch

from services.rollout.engine.sglang_plugin.shards import Cut, Shard
from services.trainer.backend.ranks.ranks import Ranks
from tests.support.trainer.rank_pool import RankPool

CUTS = {
    "rows": ((6, 5), {"dim": 0, "size": 6, "stride": 3}, 1),
    "columns": ((5, 6), {"dim": 1, "size": 6, "stride": 3}, 1),
    "a bias": ((6,), {"dim": 0, "size": 6, "stride": 3}, 1),
    "queries, keys and values in one": ((12, 5), {"dim": 0, "size": 12, "stride": 2, "projections": 3}, 1),
    "gate and up of experts": ((3, 8, 5), {"dim": 1, "size": 8, "stride": 2, "projections": 2}, 1),
    "a padded vocabulary": ((7, 5), {"dim": 0, "size": 7, "stride": 4}, 1),
    "one that ends in the first shard": ((3, 5), {"dim": 0, "size": 3, "stride": 4}, 1),
    "keys that both hold": ((4, 5), {"dim": 0, "size": 4, "stride": 4, "replicas": 2}, 2),
}
"""Shape of a whole, how two processes share it, and how many hold the same."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two processes."""
    with RankPool(2) as pool:
        yield pool


def shard_of(name: str, rank: int) -> Shard:
    """An empty shard."""
    shape, cut, replicas = CUTS[name]
    made = Cut(**{**cut, "rank": rank // replicas})
    sizes = list(shape)
    sizes[made.dim] = made.projections * made.length
    return Shard(tensor=torch.zeros(sizes, dtype=torch.int64), cut=made)


def whole_of(name: str) -> torch.Tensor:
    """One with a different value everywhere."""
    shape = CUTS[name][0]
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize(
    ("name", "rank", "rows"),
    [
        ("rows", 1, [3, 4, 5]),
        ("queries, keys and values in one", 0, [0, 1, 4, 5, 8, 9]),
        ("queries, keys and values in one", 1, [2, 3, 6, 7, 10, 11]),
        ("a padded vocabulary", 1, [4, 5, 6]),
        ("one that ends in the first shard", 1, []),
        ("keys that both hold", 1, [0, 1, 2, 3]),
    ],
)
def test_a_process_takes_its_rows(name: str, rank: int, rows: list[int]) -> None:
    """Of each projection the same shard."""
    shard, whole = shard_of(name, rank), whole_of(name)
    shard.write(whole)
    assert shard.shape == whole.shape
    assert torch.equal(shard.tensor, whole[rows])


def gathered(ranks: Ranks, name: str, to_rank: int, *, is_damaged: bool = False) -> torch.Tensor | None:
    """What a process gets of a parameter that each has written its shard of."""
    shard = shard_of(name, ranks.rank)
    shard.write(whole_of(name))
    if is_damaged and ranks.rank == 1:
        shard.tensor[0] += 1
    return shard.gather(torch.distributed.group.WORLD, to_rank)


@pytest.mark.parametrize("to_rank", [0, 1])
def test_all_parts_together_are_the_parameter(pool: RankPool, to_rank: int) -> None:
    """On the process that is to have it."""
    for name in CUTS:
        found = pool.run(gathered, name, to_rank)
        assert torch.equal(found.pop(to_rank), whole_of(name)), name
        assert found == [None]


def damaged(ranks: Ranks, name: str) -> torch.Tensor | None:
    """As gathered, where the second process has another value."""
    return gathered(ranks, name, 0, is_damaged=True)


@pytest.mark.parametrize("name", ["columns", "keys that both hold"])
def test_a_wrong_part_is_seen(pool: RankPool, name: str) -> None:
    """Also where another process has the right one."""
    whole, _ = pool.run(damaged, name)
    assert not torch.equal(whole, whole_of(name))


def test_a_part_of_another_size_is_refused() -> None:
    """SGLang may pad what it divides."""
    with pytest.raises(ValueError, match=r"a shard has the shape \[4, 5\]"):
        Shard(tensor=torch.zeros(4, 5), cut=Cut(dim=0, size=6, stride=3, rank=0))
