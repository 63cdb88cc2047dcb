"""Which prefill and decode replicas go together, and who is left without a partner."""

import pytest

from services.router.balancing import (
    Query,
    ReplicaStatus,
    UnroutableReason,
    explain,
    find_reason,
    largest,
    make_balancer,
    pair_up,
    sizes,
)
from services.router.balancing.affinity import AffinityBalancer
from services.router.config import RouterConfig
from tests.replica_statuses import DECODE, DRAINING, PREFILL, UPDATING, candidate, chosen, pool_of, replica


def half(replica_id: str, role: int, **fields) -> ReplicaStatus:
    return candidate(replica_id, role=role, **fields)


@pytest.mark.parametrize(
    ("prefill", "decode", "obstacle", "words"),
    [
        ({}, None, UnroutableReason.NO_PARTNER, "takes a prefill and a decode replica"),
        ({"version": 4}, {"version": 5}, UnroutableReason.OTHER_VERSION, "its policy version"),
        ({"tensor_parallel": 2}, {}, UnroutableReason.OTHER_TENSOR_PARALLEL, "SGLang cannot move a KV cache"),
        ({"backend": "nixl"}, {}, UnroutableReason.OTHER_BACKEND, "transfer_backend"),
        ({"backend": ""}, {}, UnroutableReason.ROLE, "no role"),
        ({"state": DRAINING}, {}, UnroutableReason.DRAINING, "draining"),
        ({"state": UPDATING}, {}, UnroutableReason.UPDATING, "push"),
        ({"failing": True}, {}, UnroutableReason.FAILING, "failing"),
        ({"in_flight": 8}, {}, UnroutableReason.FULL, "limit"),
        ({}, {}, None, ""),
    ],
)
def test_tells_why_a_half_answers_nothing(
    prefill: dict, decode: dict | None, obstacle: UnroutableReason | None, words: str
) -> None:
    """Each with its own reason, both of the two halves, and no call is given to either."""
    first = half("p", PREFILL, **prefill)
    pool = pool_of(first, *([] if decode is None else [half("d", DECODE, **decode)]))
    assert find_reason(first, Query(), 0.0) is obstacle
    assert chosen(make_balancer(RouterConfig()), pool) == (None if obstacle else "p")
    if obstacle is not None:
        assert words in obstacle.value
    if decode is not None:
        theirs = find_reason(pool["d"], Query(), 0.0)
        if obstacle in (
            UnroutableReason.OTHER_VERSION,
            UnroutableReason.OTHER_TENSOR_PARALLEL,
            UnroutableReason.OTHER_BACKEND,
            None,
        ):
            assert theirs is obstacle
        else:
            unpaired = {
                UnroutableReason.ROLE: UnroutableReason.NO_PARTNER,
                UnroutableReason.FULL: UnroutableReason.PARTNERS_FULL,
            }
            assert theirs is unpaired.get(obstacle, UnroutableReason.PARTNERS_UNFIT)


def test_partners_are_found_anew_when_leases_change() -> None:
    """In a rolling push a pair is one exactly while both versions are equal; who stands alone is told of once."""
    first, second = half("p", PREFILL, version=1), half("d", DECODE, version=1)
    assert pair_up([first, second]) == []
    assert (first.partners, second.partners) == ((second,), (first,))
    first.update(replica("p", role=PREFILL, version=2))
    assert pair_up([first, second]) == [first, second]
    assert pair_up([first, second]) == []
    assert (first.partners, second.partners) == ((), ())
    second.update(replica("d", role=DECODE, version=2))
    assert pair_up([first, second]) == []
    assert first.is_fit(Query(), 0.0)


def test_a_session_stays_with_its_prefill_replica_and_decodes_where_there_is_room() -> None:
    """The prefix cache is in the prefill replica; who decodes is chosen anew by load."""
    policy = AffinityBalancer(max_sessions=10)
    pool = pool_of(*(half(name, PREFILL) for name in "pq"), *(half(name, DECODE) for name in "de"))
    home = chosen(policy, pool, Query(session_id="s"))
    assert home == "p"
    for busy, idle in (("d", "e"), ("e", "d")):
        pool[busy].num_in_flight, pool[idle].num_in_flight = 5, 1
        pool["p"].num_in_flight = 3
        assert chosen(policy, pool, Query(session_id="s")) == home
        partner = pool[home].find_partner(Query(), 0.0)
        assert partner is not None
        assert partner.replica_id == idle


def test_a_pair_is_as_busy_as_both_of_its_halves() -> None:
    """A new session goes to a unified replica when decoding is what is scarce, and to a pair when it is not."""
    pool = pool_of(candidate("u", in_flight=4), half("p", PREFILL), half("d", DECODE))
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "p"
    pool["d"].num_in_flight = 5
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "u"


def test_a_prompt_is_given_to_replicas_that_can_hold_it() -> None:
    """As small as its smaller half is a pair; one that does not say takes everything."""
    pool = pool_of(
        candidate("u", max_tokens=10), half("p", PREFILL, max_tokens=30), half("d", DECODE, max_tokens=20, in_flight=1)
    )
    assert largest(pool.values()) == 20
    assert sizes(pool.values()) == [10, 20, 30]
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=10)) == "u"
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=11)) == "p"
    why = explain(pool.values(), Query(num_tokens=21), 0.0)
    assert why.reasons == {UnroutableReason.SMALL: 2, UnroutableReason.PARTNERS_UNFIT: 1}
    pool["v"] = candidate("v")
    assert largest(pool.values()) > 10**9
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=21)) == "v"
    assert largest([]) > 10**9
