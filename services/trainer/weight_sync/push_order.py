"""The order in which replicas take their turns in a push. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from penstock.v1 import common_pb2


def in_turn(replicas: Iterable[common_pb2.Replica]) -> list[common_pb2.Replica]:
    """Order by id, with the roles interleaved in proportion.

    A prefill and a decode replica can answer together only while they hold the same version. If all of one role came
    first, no pair would be left in the middle of a push.
    """
    of_role: defaultdict[int, list[common_pb2.Replica]] = defaultdict(list)
    for replica in sorted(replicas, key=lambda each: each.replica_id):
        of_role[replica.role].append(replica)
    ranked = [
        ((index + 0.5) / len(same), replica.replica_id, replica)
        for same in of_role.values()
        for index, replica in enumerate(same)
    ]
    return [replica for *_, replica in sorted(ranked, key=lambda each: each[:2])]
