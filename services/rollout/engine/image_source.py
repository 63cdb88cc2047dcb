"""Gets a request's images from the request itself or, by content hash, from the run's bus."""

import asyncio
from collections.abc import Sequence

from penstock.bus.image_store import ImageStore
from penstock.errors import InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import common_pb2


class ImageSource:
    """Finds the encoded image files of a request."""

    def __init__(self) -> None:
        """Start without a store: only images inside requests are found."""
        self._store: ImageStore | None = None

    def attach(self, store: ImageStore) -> None:
        """Fetch stored images from `store`."""
        self._store = store

    async def files(self, images: Sequence[common_pb2.Image]) -> list[bytes]:
        """Return the encoded files of `images`, in their order.

        Raises:
            InvalidRequestError: an image has neither bytes nor a valid hash, or this engine has no bus.
            MissingImageError: an image is not stored.
            NotReadyError: the bus does not answer.
        """
        return list(await asyncio.gather(*(self._file(index, image) for index, image in enumerate(images))))

    async def _file(self, index: int, image: common_pb2.Image) -> bytes:
        match image.WhichOneof("content"):
            case "data":
                return image.data
            case "stored" if self._store is not None:
                try:
                    return await self._store.get(image.stored.scope, image.stored.sha256)
                except UnavailableError as error:  # an UnavailableError would count as a failure of this replica
                    raise NotReadyError(f"images[{index}]: {error}") from None
            case "stored":
                raise InvalidRequestError(
                    f"images[{index}] is named by its hash, but this engine runs without a bus; send its bytes"
                )
        raise InvalidRequestError(f"images[{index}] has neither data nor stored; set one of them")
