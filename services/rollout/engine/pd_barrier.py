"""Keeps pushes and prefill/decode pairs apart: no KV cache is decoded by other weights than those that made it.

Invariant: a request passes only under the policy version that its pair was chosen for, and none is inside SGLang while
weights change. SGLang's own pauses do not hold for pairs: each half would resume by itself, with what the other half
computed from older weights.
"""

import asyncio

from penstock.errors import NotReadyError
from penstock.v1 import generate_pb2


class Barrier:
    """Open between pushes; while it is closed, requests wait."""

    def __init__(self) -> None:
        """Open, at version 0."""
        self.version = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def close(self) -> None:
        """From now on requests wait."""
        self._opened.clear()

    def open(self) -> None:
        """Let those that waited, and all that come, be looked at under the version of now."""
        self._opened.set()

    async def passed(self, bootstrap: generate_pb2.Bootstrap) -> int:
        """Wait until it is open; the version under which the request begins, and stays to its end.

        Raises:
            NotReadyError: the pair was chosen for another version.
        """
        await self._opened.wait()
        if bootstrap.policy_version != self.version:
            raise NotReadyError(
                f"bootstrap.policy_version = {bootstrap.policy_version}, but this engine serves version "
                f"{self.version}; choose a pair anew: both halves must hold the same version"
            )
        return self.version
