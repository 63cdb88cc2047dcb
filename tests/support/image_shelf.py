"""An image store in memory, for what needs images and no bus."""

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

    async def wait_for(self, scope: str, sha256: str) -> bytes:
        """A stored image; the shelf is never away."""
        return await self.get(scope, sha256)

    async def get(self, scope: str, sha256: str) -> bytes:
        """A stored image."""
        try:
            return self.images[scope, sha256]
        except KeyError:
            raise MissingImageError(f"image {sha256} is not stored") from None
