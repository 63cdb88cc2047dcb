"""Prefix balancing: a prompt goes to a replica that has computed its beginning."""

from services.router.balancing import Query, hash_blocks, make_balancer
from services.router.config import Balancing
from services.router.tuning import Tuning
from tests.support.router.replica_statuses import Fleet, chosen, described


def test_prefix_sends_a_prompt_where_its_beginning_is() -> None:
    """The longest known beginning counts; a prompt that nobody had goes to the least loaded."""
    balancer = make_balancer(Balancing.PREFIX, Tuning())
    pool = Fleet(described("a"), described("b", running=1), described("c", running=2))
    system, question = [1] * 128, [2] * 64
    balancer.record(Query(blocks=hash_blocks(system)), "c")
    balancer.record(Query(blocks=hash_blocks(system + question)), "b")
    assert chosen(balancer, pool, Query(blocks=hash_blocks(system + question + [3] * 64))) == "b"
    pool.set_in_flight("b", 8)
    assert chosen(balancer, pool, Query(blocks=hash_blocks([9] * 64))) == "a"


def test_prefix_leaves_a_replica_that_has_too_much() -> None:
    """The cache is worth some load, not any: here up to 1.25 times the least, and a quarter of the slots."""
    balancer = make_balancer(Balancing.PREFIX, Tuning())
    pool = Fleet(described("a", max_running=8), described("b", max_running=8))
    query = Query(blocks=hash_blocks([1] * 64))
    balancer.record(query, "a")
    pool.set_in_flight("a", 2)
    assert chosen(balancer, pool, query) == "a"
    pool.set_in_flight("a", 3)
    assert chosen(balancer, pool, query) == "b"


def test_prefix_remembers_so_many_blocks() -> None:
    """The blocks unused for longest are forgotten."""
    balancer = make_balancer(Balancing.PREFIX, Tuning(max_prefix_blocks=2))
    pool = Fleet(described("a"), described("b", running=1))
    queries = [Query(blocks=hash_blocks([number] * 64)) for number in range(3)]
    for query in queries:
        balancer.record(query, "b")
    assert [chosen(balancer, pool, query) for query in queries[1:]] == ["b", "b"]
    assert chosen(balancer, pool, queries[0]) == "a"


def test_blocks_stand_for_all_that_comes_before_them() -> None:
    """Whole blocks only; an equal block after another beginning, or below another image, is another."""
    ids = list(range(200))
    blocks = hash_blocks(ids)
    assert len(blocks) == 3
    assert hash_blocks(ids[:191]) == blocks[:2]
    assert hash_blocks(ids[:128] + [7] * 72)[:2] == blocks[:2]
    assert not set(hash_blocks([5, *ids[1:]])) & set(blocks)
    assert not set(hash_blocks(ids, [b"one"])) & set(hash_blocks(ids, [b"two"]))
    assert hash_blocks(ids, [b"one"])[:3] == hash_blocks(ids, [b"one", b"two"])[:3]
