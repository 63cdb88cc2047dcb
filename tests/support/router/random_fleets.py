"""Pools of replicas for property tests."""

from hypothesis import strategies as st

from penstock.v1 import common_pb2
from tests.support.router.replica_statuses import DECODE, PREFILL, Fleet, described


def _fleets(**fields: st.SearchStrategy) -> st.SearchStrategy[Fleet]:
    replicas = st.builds(
        described,
        st.sampled_from("abcdefgh"),
        running=st.integers(0, 20),
        queued=st.integers(0, 20),
        max_running=st.integers(0, 16),
        max_tokens=st.sampled_from([0, 10, 20]),
        in_flight=st.integers(0, 20),
        **fields,
    )
    distinct = st.lists(replicas, max_size=8, unique_by=lambda each: each.lease.replica_id)
    return distinct.map(lambda given: Fleet(*given))


fleets = _fleets(
    state=st.sampled_from(common_pb2.ReplicaState.values()),
    version=st.integers(0, 5),
    role=st.sampled_from(common_pb2.ReplicaRole.values()),
    backend=st.sampled_from(["mooncake", "mooncake", "nixl", ""]),
    tensor_parallel=st.sampled_from([1, 1, 2]),
    failing=st.booleans(),
    rejecting=st.booleans(),
)
"""Up to eight replicas, in any state, load and role."""

paired_fleets = _fleets(role=st.sampled_from([PREFILL, DECODE]), version=st.integers(0, 1))
"""Up to eight peers, most with several partners."""
