"""Which prefill and decode replicas form pairs, and which are left without a partner."""

from collections.abc import Callable

import pytest
from hypothesis import given

from penstock.v1 import common_pb2
from services.router.balancing import (
    NEEDS_NONE,
    UNBOUNDED,
    Query,
    ReplicaStatus,
    UnroutableReason,
    make_balancer,
    pair_up,
)
from services.router.balancing.affinity import AffinityBalancer
from services.router.config import Balancing
from services.router.tuning import Tuning
from tests.support.router.random_fleets import fleets, paired_fleets
from tests.support.router.replica_statuses import (
    DECODE,
    DRAINING,
    PREFILL,
    UPDATING,
    Described,
    Fleet,
    chosen,
    described,
    replica,
)

OTHER_ROLE = {PREFILL: DECODE, DECODE: PREFILL}
MUST_AGREE: list[tuple[UnroutableReason, Callable[[common_pb2.Replica], object]]] = [
    (UnroutableReason.OTHER_BACKEND, lambda each: each.disaggregation.transfer_backend),
    (UnroutableReason.OTHER_TENSOR_PARALLEL, lambda each: each.disaggregation.tensor_parallel),
    (UnroutableReason.OTHER_VERSION, lambda each: each.policy_version),
]


def peer(replica_id: str, role: int, **fields) -> Described:
    return described(replica_id, role=role, **fields)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason", "words"),
    [
        ({}, None, UnroutableReason.NO_PARTNER, "a prefill and a decode replica answer together"),
        ({"version": 4}, {"version": 5}, UnroutableReason.OTHER_VERSION, "same policy version"),
        ({"tensor_parallel": 2}, {}, UnroutableReason.OTHER_TENSOR_PARALLEL, "SGLang cannot move a KV cache"),
        ({"backend": "nixl"}, {}, UnroutableReason.OTHER_BACKEND, "transfer_backend"),
        ({"backend": ""}, {}, UnroutableReason.ROLE, "without a role"),
        ({"state": DRAINING}, {}, UnroutableReason.DRAINING, "draining"),
        ({"state": UPDATING}, {}, UnroutableReason.UPDATING, "push"),
        ({"failing": True}, {}, UnroutableReason.FAILING, "failing"),
        ({"in_flight": 8}, {}, UnroutableReason.FULL, "limit"),
        ({}, {}, None, ""),
    ],
)
def test_says_why_a_peer_answers_nothing(
    prefill: dict, decode: dict | None, reason: UnroutableReason | None, words: str
) -> None:
    """Each with its own reason, for both peers, and no call is given to either."""
    fleet = Fleet(peer("p", PREFILL, **prefill), *([] if decode is None else [peer("d", DECODE, **decode)]))
    assert fleet.view.find_reason(fleet["p"], Query(), 0.0) is reason
    assert chosen(make_balancer(Balancing.AFFINITY, Tuning()), fleet) == (None if reason else "p")
    if reason is not None:
        assert words in reason.value
    if decode is not None:
        theirs = fleet.view.find_reason(fleet["d"], Query(), 0.0)
        if reason in (
            UnroutableReason.OTHER_VERSION,
            UnroutableReason.OTHER_TENSOR_PARALLEL,
            UnroutableReason.OTHER_BACKEND,
            None,
        ):
            assert theirs is reason
        else:
            unpaired = {
                UnroutableReason.ROLE: UnroutableReason.NO_PARTNER,
                UnroutableReason.FULL: UnroutableReason.PARTNERS_FULL,
            }
            assert theirs is unpaired.get(reason, UnroutableReason.PARTNERS_UNFIT)


@given(fleets | paired_fleets)
def test_partners_are_all_that_match_or_there_is_a_reason(fleet: Fleet) -> None:
    """Replica by replica: the peers of the other role that agree in all; else the first thing in which none agrees."""
    leases = [each.lease for each in fleet.slots.values()]
    for own, partners in zip(leases, pair_up(leases).values(), strict=True):
        if own.role not in OTHER_ROLE:
            assert partners is NEEDS_NONE
            continue
        peers = [each for each in leases if each.role == OTHER_ROLE[own.role] and each.HasField("disaggregation")]
        lack = UnroutableReason.NO_PARTNER
        for reason, agree in MUST_AGREE:
            if peers:
                peers, lack = [each for each in peers if agree(each) == agree(own)], reason
        assert partners.replica_ids == tuple(each.replica_id for each in peers)
        assert partners.lack is (None if peers else lack)


@given(fleets | paired_fleets)
def test_a_pair_is_as_busy_and_as_large_as_its_partner_allows(fleet: Fleet) -> None:
    """Replica by replica: the least load of any partner is added, and no pair holds more than its largest partner."""

    def partners(own: ReplicaStatus) -> list[ReplicaStatus]:
        return [fleet[each] for each in own.partner_ids or ()]

    statuses = list(fleet.view.replicas.values())
    assert fleet.view.loads(statuses) == {
        own.replica_id: own.load + min((each.load for each in partners(own)), default=0.0) for own in statuses
    }
    assert fleet.view.next_loads(statuses) == {
        own.replica_id: own.next_load + min((each.next_load for each in partners(own)), default=0.0) for own in statuses
    }
    sizes = [
        min(own.max_tokens, max((each.max_tokens for each in partners(own)), default=UNBOUNDED)) for own in statuses
    ]
    assert fleet.view.largest() == max(sizes, default=UNBOUNDED)


def test_partners_are_found_anew_when_leases_change() -> None:
    """In a rolling push a pair exists exactly while both versions are equal; a lost partner is reported once."""
    fleet = Fleet(peer("p", PREFILL, version=1), peer("d", DECODE, version=1))
    assert (fleet["p"].partner_ids, fleet["d"].partner_ids) == (("d",), ("p",))
    fleet.slots["p"].update(replica("p", role=PREFILL, version=2))
    assert fleet.pair_up() == ["p", "d"]
    assert fleet.pair_up() == []
    assert (fleet["p"].partner_ids, fleet["d"].partner_ids) == ((), ())
    fleet.slots["d"].update(replica("d", role=DECODE, version=2))
    assert fleet.pair_up() == []
    assert fleet.view.is_fit(fleet["p"], Query(), 0.0)


def test_a_session_stays_with_its_prefill_replica_and_decodes_where_there_is_room() -> None:
    """The prefix cache is in the prefill replica; who decodes is chosen anew by load."""
    balancer = AffinityBalancer(max_sessions=10)
    pool = Fleet(*(peer(name, PREFILL) for name in "pq"), *(peer(name, DECODE) for name in "de"))
    home = chosen(balancer, pool, Query(session_id="s"))
    assert home == "p"
    for busy, idle in (("d", "e"), ("e", "d")):
        pool.set_in_flight(busy, 5)
        pool.set_in_flight(idle, 1)
        pool.set_in_flight("p", 3)
        assert chosen(balancer, pool, Query(session_id="s")) == home
        partner = pool.view.find_partner(pool["p"], Query(), 0.0)
        assert partner is not None
        assert partner.replica_id == idle


def test_a_pair_is_as_busy_as_both_of_its_peers() -> None:
    """A new session goes to a unified replica when decoding is what is scarce, and to a pair when it is not."""
    pool = Fleet(described("u", in_flight=4), peer("p", PREFILL), peer("d", DECODE))
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "p"
    pool.set_in_flight("d", 5)
    assert chosen(AffinityBalancer(max_sessions=1), pool) == "u"


def test_a_call_that_reports_on_its_prompt_is_given_to_unified_replicas() -> None:
    """However busy they are: the peers of pairs say why they take none."""
    pool = Fleet(described("u", in_flight=7), peer("p", PREFILL), peer("d", DECODE))
    query = Query(wants_unified=True)
    for name in Balancing:
        assert chosen(make_balancer(name, Tuning()), pool, query) == "u"
    assert [pool.view.find_reason(pool[each], query, 0.0) for each in "pd"] == [UnroutableReason.PAIRED] * 2
    pool.set_in_flight("u", 16)
    assert chosen(make_balancer(Balancing.ROUND_ROBIN, Tuning()), pool, query) is None
    assert str(pool.view.explain(query, 0.0)) == (
        "of 3 replicas 1 at the limit of calls, 2 in PD pairs, which report nothing on a prompt's tokens"
    )


def test_a_pool_has_a_unified_replica_only_for_what_that_can_hold() -> None:
    """A prompt that fits a pair alone is refused there at once, instead of waiting for what will never take it."""
    pool = Fleet(described("u", max_tokens=100), peer("p", PREFILL), peer("d", DECODE))
    assert [pool.view.has_unified(num_tokens) for num_tokens in (100, 101)] == [True, False]
    pool.remove("u")
    assert not pool.view.has_unified(1)


def test_a_prompt_is_given_to_replicas_that_can_hold_it() -> None:
    """A pair is as small as its smaller peer; one that does not say takes everything."""
    pool = Fleet(
        described("u", max_tokens=10), peer("p", PREFILL, max_tokens=30), peer("d", DECODE, max_tokens=20, in_flight=1)
    )
    assert pool.view.largest() == 20
    assert pool.view.sizes() == [10, 20, 30]
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=10)) == "u"
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=11)) == "p"
    why = pool.view.explain(Query(num_tokens=21), 0.0)
    assert why.reasons == {UnroutableReason.SMALL: 2, UnroutableReason.PARTNERS_UNFIT: 1}
    pool.add(described("v"))
    assert pool.view.largest() > 10**9
    assert chosen(AffinityBalancer(max_sessions=1), pool, Query(num_tokens=21)) == "v"
    assert Fleet().view.largest() > 10**9
