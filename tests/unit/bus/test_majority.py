"""What a stream's description says of its leader: that it reaches a majority, or for how long it has not."""

import math

import pytest
from nats.js.api import ClusterInfo, PeerInfo

from penstock.bus.cluster.majority import silence_s


def described(leader: str | None, **active_s: float) -> ClusterInfo:
    """The description of a stream whose other servers were heard so many seconds ago."""
    replicas = [
        PeerInfo(name=name, active=int(seconds * 1e9), current=seconds > 0) for name, seconds in active_s.items()
    ]
    return ClusterInfo(leader=leader, replicas=replicas or None)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param(None, 0.0, id="no cluster"),
        pytest.param(described("a"), 0.0, id="one server"),
        pytest.param(described("a", b=0.5, c=0.25), 0.25, id="three"),
        pytest.param(described("a", b=40.0, c=0.5), 0.5, id="one of three is away"),
        pytest.param(described("a", b=8.0, c=9.0), 8.0, id="two of three are away"),
        pytest.param(described("a", b=0.5, c=7.0, d=6.0, e=1.0), 1.0, id="two of five are away"),
        pytest.param(described("a", b=0.5, c=7.0, d=6.0, e=8.0), 6.0, id="three of five are away"),
        pytest.param(described("a", b=0.0, c=7.0), 7.0, id="one was never heard"),
        pytest.param(described(None, b=0.5, c=0.5), math.inf, id="no leader"),
        pytest.param(described("b", b=0.5, c=0.5), math.inf, id="said by another server than the leader"),
    ],
)
def test_a_leader_needs_a_majority(cluster: ClusterInfo | None, expected: float) -> None:
    """With itself: of three servers one other, of five two."""
    assert silence_s(cluster) == expected


def test_a_server_that_is_heard_just_now_counts() -> None:
    """Its age may be 0, as that of one that was never heard."""
    peers = [PeerInfo(name="b", active=0, current=True), PeerInfo(name="c", active=0, current=False)]
    assert silence_s(ClusterInfo(leader="a", replicas=peers)) == 0.0
    assert silence_s(ClusterInfo(leader="a", replicas=peers[1:])) == math.inf
