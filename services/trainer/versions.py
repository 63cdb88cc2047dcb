"""Policy version numbers: which one a trainer starts with, so that none ever stands for two sets of weights."""

import json

import nats.js.errors
from nats.js.kv import KeyValue

from penstock.bus import leases
from penstock.bus.failures import setting_up
from penstock.bus.replica_lease import read_replica


def first_version(*, checkpoint: int | None, published: int, reserved: int, newest_held: int) -> int:
    """Return the version under which a trainer publishes the weights it starts with.

    After an orderly stop the checkpoint holds the weights published last. They keep their number, and groups sampled
    from them stay as fresh as they were.

    Args:
        checkpoint: Version of the weights in the checkpoint; None for a new run.
        published: The version announced last.
        reserved: The last version for which a push began.
        newest_held: The newest version that a living replica holds, because NATS may have lost the other two.
    """
    last = max(published, reserved, newest_held, checkpoint or 0)
    return last if checkpoint == published == last else last + 1


async def version_at(bucket: KeyValue, key: str, url: str) -> int:
    """Return the version stored under a key of the bucket `policy`; 0 if there is none.

    Raises:
        SetupError: the server does not answer.
    """
    try:
        with setting_up("bucket policy", url, passing=nats.js.errors.KeyNotFoundError):
            entry = await bucket.get(key)
    except nats.js.errors.KeyNotFoundError:
        return 0
    return int(json.loads(entry.value or b"{}")["version"])


def newest_version_held(replicas: leases.Watch) -> int:
    """Return the newest version that a living replica holds; 0 if there is none."""
    living = (read_replica(key, value) for key, value in replicas.values.items())
    return max((replica.policy_version for replica in living if replica is not None), default=0)
