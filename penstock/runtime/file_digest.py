"""A digest of a file, which shows whether the disk still holds what was written.

It guards against mistakes, not against an adversary.
"""

from pathlib import Path

import xxhash

_BLOCK_BYTES = 8 * 2**20


def file_digest(path: Path) -> str:
    """Return the XXH3-64 digest of a file's bytes, in hex. Lets other threads run while it reads and computes.

    Raises:
        OSError: the file cannot be read.
    """
    state = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            state.update(block[:num_bytes])
    return state.hexdigest()
