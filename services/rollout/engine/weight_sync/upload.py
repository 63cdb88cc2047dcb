"""The unnamed file that receives the upload of a delta. It disappears with this process."""

import asyncio
import os
import tempfile
import zlib
from collections.abc import AsyncIterator

from penstock.errors import InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import rollout_pb2


class Upload:
    """Room for the bytes of one push."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in TMPDIR. Blocking.

        Raises:
            NotReadyError: there is not enough room.
        """
        self.size_bytes = size_bytes
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._filled = 0
        try:
            if size_bytes:
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            self.close()
            raise NotReadyError(
                f"no room for an upload of {size_bytes} bytes in {tempfile.gettempdir()} ({error.strerror}); "
                "make room, or set TMPDIR to another folder"
            ) from None

    @property
    def path(self) -> str:
        """The path at which processes of this engine open the file."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self._filled == self.size_bytes

    async def fill(self, chunks: AsyncIterator[rollout_pb2.SendWeightsRequest]) -> None:
        """Store all chunks.

        Raises:
            InvalidRequestError: they contain more or fewer bytes than announced.
            UnavailableError: a chunk is damaged or cannot be written.
        """
        self._filled = 0
        async for chunk in chunks:
            if self._filled + len(chunk.data) > self.size_bytes:
                raise InvalidRequestError(f"data: more than the {self.size_bytes} announced bytes arrived")
            await asyncio.to_thread(self._write, chunk)
            self._filled += len(chunk.data)
        if not self.is_complete:
            raise InvalidRequestError(f"data: {self._filled} of {self.size_bytes} announced bytes arrived")

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()

    def _write(self, chunk: rollout_pb2.SendWeightsRequest) -> None:
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise UnavailableError(f"the upload is damaged after {self._filled} bytes; send it again")
        try:
            os.pwrite(self._file.fileno(), chunk.data, self._filled)
        except OSError as error:
            raise UnavailableError(f"the upload cannot be written to {tempfile.gettempdir()}: {error}") from None
