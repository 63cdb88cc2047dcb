"""Whether the leader of a stream still reaches a majority of its servers, by its own description of the stream.

A leader that has lost its routes notices only after 10 to 20 s: nats-server looks every ten seconds for servers that
have been silent for ten. Until then it answers questions and takes writes, which are never stored. Its description of
a stream, though, says how long ago it heard from each of the others, which it asks every second or two.
"""

import math

from nats.js import api

BEAT_S = 2.0
"""Seconds for which a leader may hear nothing from healthy servers."""
ALONE_S = 3.0
"""Seconds after which a leader that hears too few servers is alone."""


def silence_s(cluster: api.ClusterInfo | None) -> float:
    """Return for how many seconds the stream's leader has heard too few servers for a majority; 0: of a single server.

    Infinite if the stream has no leader: then another of its servers may have given the description. The replicas in it
    are the servers beside the one that gave it.
    """
    if cluster is None:
        return 0.0
    others = cluster.replicas or []
    if cluster.leader in (None, "", *(peer.name for peer in others)):
        return math.inf
    # A server that has not been heard since this leader was elected has an age of 0, and is not current.
    ages = sorted(peer.active / 1e9 if peer.active else 0.0 if peer.current else math.inf for peer in others)
    num_needed = (len(others) + 1) // 2
    return ages[num_needed - 1] if num_needed else 0.0
