"""Calculates what a push takes of an engine's GPU, beside the weights and the KV cache.

Buckets arrive in buffers, which exist as long as a part of them is in flight or being loaded. Large weights arrive in
place only in an engine of one process that has proven the addresses of its parameters, so its first push takes most.
In an engine of several processes, these then put whole weights together, one at a time, to compare digests; the buffers
are gone by then. A weight that an adapter changes is computed in float32, after the base's digests have been compared.
"""

import collections
import math
from collections.abc import Iterator

from penstock.weights.manifest import MAX_BUCKET_BYTES, Manifest, TensorSpec
from services.plan.model_shape import ModelShape

PARTS_IN_FLIGHT = 5
"""Parts that are sent or received at a time, or are being loaded."""
_FLOAT32, _BFLOAT16 = 4, 2


def push_bytes(shape: ModelShape, *, tensor_parallel: int) -> int:
    """Return the most bytes that a push takes of each of an engine's GPUs, whichever transport it uses."""
    part = 1 / tensor_parallel
    largest = _BFLOAT16 * max(size for _, size in shape.sizes)
    put_together = 0 if tensor_parallel == 1 else math.ceil((2 + part) * largest)  # whole, all its shards, and one
    if shape.adapters is not None:
        # The largest change and its part; then that part, with the base's in both precisions and their sum.
        changing = max(_FLOAT32 * (1 + part), (3 * _FLOAT32 + _BFLOAT16) * part)
        merging = math.ceil(_FLOAT32 * shape.adapters.num_parameters + changing * max(shape.adapters.changed_sizes))
        return max(merging, put_together)
    return max(max(_arriving(shape)), put_together)


def _arriving(shape: ModelShape) -> Iterator[int]:
    """Yield the bytes of the buckets that exist, each time that a part is received."""
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(size,)) for name, size in shape.sizes]
    parts = collections.deque[int]()
    loaded: set[int] = set()  # the last bucket, until another is complete
    sizes: list[int] = []
    for number, bucket in enumerate(Manifest.plan(specs, max_bucket_bytes=MAX_BUCKET_BYTES).buckets):
        sizes.append(sum(spec.num_bytes for spec in bucket))
        for _ in range(min(PARTS_IN_FLIGHT, math.ceil(sizes[-1] / MAX_BUCKET_BYTES))):
            parts.append(number)
            yield sum(sizes[each] for each in {*parts, *loaded})
            if len(parts) == PARTS_IN_FLIGHT and parts.popleft() != parts[0]:
                loaded = {min(parts) - 1}
