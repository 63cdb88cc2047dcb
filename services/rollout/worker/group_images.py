"""The images of one group while it is played: the prompt's, and those that its environments add.

Each is stored once, no matter how many samples and turns show it; requests and records name it by its hash. The bytes
are kept here until the group is played, so that a lost image can be stored again.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Protocol

from penstock.records import Prompt
from penstock.v1 import common_pb2


class Store(Protocol):
    """Stores images: `penstock.bus.image_store.ImageStore`."""

    async def put(self, scope: str, data: bytes) -> str:
        """Store an image and return its hash."""
        ...

    async def wait_for_all(self, scope: str, hashes: Sequence[str]) -> dict[str, bytes]:
        """Return stored images by their hashes, as soon as the store can be reached."""
        ...


class GroupImages:
    """The images of one group."""

    def __init__(self, store: Store, scope: str, prompt: Sequence[bytes]) -> None:
        """Start with `prompt`, the prompt's stored images; use `load`."""
        self._store = store
        self._scope = scope
        self.prompt = tuple(prompt)
        self._hashes: dict[bytes, str] = {}
        self._storing = asyncio.Lock()
        self._stored_again_at = -math.inf

    @classmethod
    async def load(cls, store: Store, prompt: Prompt) -> "GroupImages":
        """Fetch the prompt's images.

        Raises:
            MissingImageError: one is not stored; only the trainer, which has the data, can store it again.
            SetupError: the bus no longer stores images.
        """
        stored = await store.wait_for_all(prompt.id.scope, prompt.images)
        images = cls(store, prompt.id.scope, [stored[sha256] for sha256 in prompt.images])
        images._hashes.update((data, sha256) for sha256, data in stored.items())
        return images

    async def add(self, files: Sequence[bytes]) -> list[str]:
        """Store those of `files` that are new, and return all their hashes."""
        async with self._storing:  # samples often show the same image at the same time
            for data in files:
                if data not in self._hashes:
                    self._hashes[data] = await self._store.put(self._scope, data)
        return [self._hashes[data] for data in files]

    async def store_again(self, requested_at: float) -> None:
        """Store every image anew, after a request of time `requested_at` (`time.monotonic()`) missed one.

        A loss concerns all samples at once, so requests older than the last storing need no further one.
        """
        async with self._storing:
            if requested_at < self._stored_again_at:
                return
            self._stored_again_at = time.monotonic()
            for data in self._hashes:
                await self._store.put(self._scope, data)

    def reference(self, sha256: str) -> common_pb2.Image:
        """Return the image as requests name it."""
        return common_pb2.Image(stored=common_pb2.StoredImage(sha256=sha256, scope=self._scope))
