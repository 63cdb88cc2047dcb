"""Pools of replicas for property tests."""

from hypothesis import strategies as st

from penstock.v1 import common_pb2
from tests.support.router.replica_statuses import Fleet, described

fleets = st.lists(
    st.builds(
        described,
        st.sampled_from("abcdefgh"),
        state=st.sampled_from(common_pb2.ReplicaState.values()),
        version=st.integers(0, 5),
        running=st.integers(0, 20),
        queued=st.integers(0, 20),
        max_running=st.integers(0, 16),
        role=st.sampled_from(common_pb2.ReplicaRole.values()),
        backend=st.sampled_from(["mooncake", "mooncake", "nixl", ""]),
        tensor_parallel=st.sampled_from([1, 1, 2]),
        max_tokens=st.sampled_from([0, 10, 20]),
        in_flight=st.integers(0, 20),
        failing=st.booleans(),
        rejecting=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.lease.replica_id,
).map(lambda replicas: Fleet(*replicas))
"""Up to eight replicas, in any state, load and role."""
