"""Reads the weights of a push from the trainer's shared memory, once for all simulated engines of a process."""

import torch

from penstock.v1 import rollout_pb2
from penstock.weights.digest import tensor_digest
from penstock.weights.manifest import Manifest, views
from penstock.weights.shared_memory import ALIGNMENT, SharedMemoryHandle, open_shared_memory


class WeightReader:
    """Holds the digests of the newest push."""

    def __init__(self) -> None:
        """Start without digests."""
        self._push_id = ""
        self._digests: dict[str, int] = {}

    def read(self, push: rollout_pb2.PrepareWeightsRequest) -> dict[str, int]:
        """Return the digest of each parameter in the trainer's memory.

        Raises:
            NotReadyError: the memory cannot be opened here.
        """
        if push.push_id != self._push_id:
            manifest = Manifest.from_proto(push.manifest)
            digests: dict[str, int] = {}
            with open_shared_memory(SharedMemoryHandle.of(push.shared_memory)) as memory:
                for bucket, first in zip(manifest.buckets, manifest.offsets(ALIGNMENT), strict=False):
                    data = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
                    memory.read(first, data)
                    digests |= {name: tensor_digest(each, push.digest) for name, each in views(bucket, data).items()}
            self._push_id, self._digests = push.push_id, digests
        return self._digests
