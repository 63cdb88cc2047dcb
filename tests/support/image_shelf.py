"""An image store in memory, for what needs images and no bus."""

from collections.abc import Sequence

from penstock.bus.image_store import hash_of
from penstock.errors import MissingImageError


class ImageShelf:
    """Keeps images by scope and hash; `num_stored` counts what was stored."""

    def __init__(self) -> None:
        self.images: dict[tuple[str, str], bytes] = {}
        self.num_stored = 0

    async def put(self, scope: str, data: bytes) -> str:
        """Store an image."""
        self.num_stored += 1
        self.images[scope, hash_of(data)] = data
        return hash_of(data)

    async def wait_for_all(self, scope: str, hashes: Sequence[str]) -> dict[str, bytes]:
        """Stored images by their hashes; the shelf is never away."""
        return {sha256: await self.get(scope, sha256) for sha256 in hashes}

    async def get(self, scope: str, sha256: str) -> bytes:
        """A stored image."""
        try:
            return self.images[scope, sha256]
        except KeyError:
            raise MissingImageError(f"image {sha256} is not stored") from None
