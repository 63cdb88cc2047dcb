"""Whether the leader of a stream still reaches a majority of its servers, by its own description of the stream.

A leader that has lost its routes notices only after 10 to 20 s: nats-server looks every ten seconds for servers that
have been silent for ten. Until then it answers questions and takes writes, which are never stored. Its description of
a stream, though, says how long ago it heard from each of the others, which answer it every second.
"""

import math

from nats.js import api

ALONE_S = 2.0
"""A leader is alone that has not heard from a majority for this many seconds."""


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
    num_needed = (len(others) + 1) // 2
    return sorted((peer.active or 0) / 1e9 for peer in others)[num_needed - 1] if num_needed else 0.0
