"""What each process of a tensor-parallel engine holds of a parameter, that all shards together are the parameter, and
that a process that fails holds up no other."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.manifest import Manifest, chunks, pack, specs_of
from services.rollout.engine.sglang_plugin.digests import Agreement, GatherMemory, shared_digests
from services.rollout.engine.sglang_plugin.shards import Cut, Section, Shard
from services.rollout.engine.sglang_plugin.transports import BroadcastTransport
from services.rollout.engine.sglang_plugin.weight_loader import take_into
from services.trainer.backend.ranks.ranks import Ranks
from tests.support.trainer.ranks.rank_pool import RankPool

CUTS = {
    "rows": ((6, 5), 0, [(6, 3)], 1),
    "columns": ((5, 6), 1, [(6, 3)], 1),
    "a bias": ((6,), 0, [(6, 3)], 1),
    "queries, keys and values in one": ((12, 5), 0, [(4, 2)] * 3, 1),
    "queries, keys and values that are convolved": ((16, 1, 4), 0, [(4, 2), (4, 2), (8, 4)], 1),
    "experts as wholes": ((6, 4, 5), 0, [(6, 3)], 1),
    "gate and up of experts": ((3, 8, 5), 1, [(4, 2)] * 2, 1),
    "a padded vocabulary": ((7, 5), 0, [(7, 4)], 1),
    "a padded middle": ((5, 7), 1, [(7, 4)], 1),
    "padded sections": ((12, 5), 0, [(7, 4), (5, 3)], 1),
    "one that ends in the first shard": ((3, 5), 0, [(3, 4)], 1),
    "keys that both hold": ((4, 5), 0, [(4, 4)], 2),
    "sections that both hold": ((10, 5), 0, [(4, 4), (6, 6)], 2),
}
"""Shape of a whole, its dimension that two processes share, sizes and strides there, and how many hold the same."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two processes."""
    with RankPool(2) as pool:
        yield pool


def shard_of(name: str, rank: int) -> Shard:
    """An empty shard."""
    shape, dim, sections, replicas = CUTS[name]
    cut = Cut(
        dim=dim,
        sections=tuple(Section(size=size, stride=stride) for size, stride in sections),
        rank=rank // replicas,
        replicas=replicas,
    )
    sizes = list(shape)
    sizes[dim] = cut.length
    return Shard(tensor=torch.zeros(sizes, dtype=torch.int64), cut=cut)


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
        ("queries, keys and values that are convolved", 0, [0, 1, 4, 5, 8, 9, 10, 11]),
        ("queries, keys and values that are convolved", 1, [2, 3, 6, 7, 12, 13, 14, 15]),
        ("a padded vocabulary", 1, [4, 5, 6]),
        ("padded sections", 1, [4, 5, 6, 10, 11]),
        ("one that ends in the first shard", 1, []),
        ("keys that both hold", 1, [0, 1, 2, 3]),
    ],
)
def test_a_process_takes_its_rows(name: str, rank: int, rows: list[int]) -> None:
    """Of each section the same shard."""
    shard, whole = shard_of(name, rank), whole_of(name)
    shard.write(whole)
    assert shard.shape == whole.shape
    assert torch.equal(shard.tensor, whole[rows])


def digests(ranks: Ranks, damaged: str | None = None) -> dict[str, int]:
    """What a process says of parameters of which each has written its shard, and the second one a wrong one."""
    shards = {name: shard_of(name, ranks.rank) for name in CUTS}
    for name, shard in shards.items():
        shard.write(whole_of(name))
        if name == damaged and ranks.rank == 1:
            shard.tensor.view(-1)[-1] += 1
    return shared_digests(shards, XXH3, dist.group.WORLD, Agreement(dist.group.WORLD))


def test_shards_together_are_the_parameter(pool: RankPool) -> None:
    """Each parameter is put together by one process, in turn."""
    found = pool.run(digests)
    assert [len(each) for each in found] == [len(list(CUTS)[rank::2]) for rank in range(2)]
    right = found[0] | found[1]
    assert right == {name: tensor_digest(whole_of(name)) for name in CUTS}
    for damaged in ("columns", "sections that both hold"):
        found = pool.run(digests, damaged)
        assert {name for name, digest in (found[0] | found[1]).items() if digest != right[name]} == {damaged}


@pytest.mark.parametrize("num_wrong", [1, 3])
@pytest.mark.parametrize("first_wrong", range(4))
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_wrong_shard_is_seen(replicas: int, first_wrong: int, num_wrong: int) -> None:
    """Of four processes, whichever have it, and also where others have the right one; a sign counts, of 0 too."""
    whole = torch.arange(8.0).reshape(4, 2) - 2  # with a 0 in it
    shards = []
    for rank in range(4):
        section = Section(size=4, stride=replicas)
        cut = Cut(dim=0, sections=(section,), rank=rank // replicas, replicas=replicas)
        shards.append(Shard(tensor=torch.zeros(replicas, 2), cut=cut))
        shards[-1].write(whole)
    right = [shard.padded_into(torch.empty(0)).clone() for shard in shards]
    wrong = {(first_wrong + number) % 4 for number in range(num_wrong)}
    held = [-part if rank in wrong else part for rank, part in enumerate(right)]
    memory = GatherMemory(dist.group.WORLD, *(torch.empty(32, dtype=torch.uint8) for _ in range(3)))
    found = [tensor_digest(memory.put_together(shards[0], tuple(parts))) for parts in (right, held)]
    assert found[0] == tensor_digest(whole)
    assert found[1] != found[0]


def without_memory(ranks: Ranks, what: str) -> str:
    """What a process is told where the second one has no memory for something."""
    shards = {name: shard_of(name, ranks.rank) for name in CUTS}
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(f"services.rollout.engine.sglang_plugin.digests.{what}", _no_memory)
        with pytest.raises(RuntimeError) as raised:
            shared_digests(shards, XXH3, dist.group.WORLD, Agreement(dist.group.WORLD))
    return str(raised.value)


def _no_memory(*_: object) -> None:
    raise MemoryError("there is none")


@pytest.mark.parametrize("what", ["GatherMemory.of", "tensor_digest"])
def test_an_error_of_one_process_is_raised_by_all(pool: RankPool, what: str) -> None:
    """The others do not wait for it in the next collective, and all go on afterwards."""
    assert pool.run(without_memory, what) == ["process 1: MemoryError: there is none"] * 2
    assert all(pool.run(digests))


def broadcast(ranks: Ranks, chunk_bytes: int) -> str:
    """Send weights, or take them without room for the first: what was said, and whether all was sent."""
    weights = {"few": torch.ones(3), "many": torch.ones(1 << 20), "more": torch.ones(1 << 20), "rest": torch.ones(5)}
    manifest = Manifest.plan(specs_of(weights), max_bucket_bytes=1 << 20)
    if ranks.rank == 0:
        parts = [part for bucket in manifest.buckets for part in chunks(pack(bucket, weights), chunk_bytes)]
        works = [dist.broadcast(part, src=0, async_op=True) for part in parts]
        return str(all(work.wait(timedelta(seconds=60.0)) for work in works))
    held = {name: Shard(tensor=torch.zeros_like(tensor)) for name, tensor in weights.items()}
    held["few"] = Shard(tensor=torch.zeros(0))
    transport = BroadcastTransport(group_name="all", chunk_bytes=chunk_bytes)
    with pytest.raises(RuntimeError) as raised:
        take_into(held, manifest, transport, {"all": dist.group.WORLD})
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [0, 100_000])
def test_one_that_fails_still_takes_what_is_sent(pool: RankPool, chunk_bytes: int) -> None:
    """The trainer and the others would wait for it until their timeout."""
    sent, said = pool.run(broadcast, chunk_bytes)
    assert sent == "True"
    assert "size of tensor" in said


def test_a_shard_of_another_size_is_refused() -> None:
    """SGLang may pad what it divides."""
    with pytest.raises(ValueError, match=r"shard of a parameter has the shape \[4, 5\]"):
        Shard(tensor=torch.zeros(4, 5), cut=Cut(dim=0, sections=(Section(size=6, stride=3),), rank=0))
