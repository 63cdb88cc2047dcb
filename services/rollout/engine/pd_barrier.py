"""Keeps pushes and PD pairs apart: a KV cache is decoded only by the weights that computed it.

Invariant: a request passes only under the policy version that its pair was chosen for, and no request is inside SGLang
while weights change. SGLang's own pauses do not work for pairs: each peer would resume alone, with KV or tokens that
the other computed from older weights.
"""

import asyncio

from penstock.errors import NotReadyError
from penstock.v1 import generate_pb2


class PdBarrier:
    """Open between pushes; while it is closed, requests wait."""

    def __init__(self) -> None:
        """Start open, at version 0."""
        self.version = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def close(self) -> None:
        """Make requests wait."""
        self._opened.clear()

    def open(self) -> None:
        """Check waiting and new requests against the current version."""
        self._opened.set()

    async def passed(self, bootstrap: generate_pb2.Bootstrap) -> int:
        """Wait until the barrier is open; return the version under which the request starts and ends.

        Raises:
            NotReadyError: the pair was chosen for another version.
        """
        await self._opened.wait()
        if bootstrap.policy_version != self.version:
            raise NotReadyError(
                f"bootstrap.policy_version = {bootstrap.policy_version}, but this engine serves version "
                f"{self.version}; choose another pair: both peers must hold the same version"
            )
        return self.version
