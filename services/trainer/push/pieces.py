"""The published version as compressed pieces, in files without a name: against the version before, and as a whole.

One more copy of the weights, the base, is kept in memory; pieces are not.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field

import structlog

from penstock.errors import SetupError
from penstock.weights.delta import write_pieces
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.transport import Stream

log = structlog.get_logger()


@dataclass(slots=True)
class Pieces:
    """Makes streams of one version at a time."""

    _newest: PublishedWeights | None = None
    _base: PublishedWeights | None = None
    """The version before it."""
    _made: dict[int, Stream] = field(default_factory=dict)
    """Of the newest, by the version that it is against."""

    async def move_on(self, weights: PublishedWeights) -> None:
        """Make the delta from the version of before to this one; afterwards streams are of this one.

        Raises:
            SetupError: there is no room for it.
        """
        if self._newest is not None and self._newest.version == weights.version:
            return
        self._newest, self._base = weights, self._newest
        self.close()
        base = self._base
        if base is not None and base.manifest == weights.manifest and base.version > 0:
            self._made[base.version] = await self._make(weights, base)

    def delta_for(self, version: int) -> Stream | None:
        """What changed against `version`, if that is known."""
        return self._made.get(version) if version else None

    async def whole(self) -> Stream:
        """All of it; made when it is first asked for.

        Raises:
            SetupError: there is no room for it.
        """
        if 0 not in self._made:
            assert self._newest is not None
            self._made[0] = await self._make(self._newest, None)
        return self._made[0]

    def close(self) -> None:
        """Let go of the files."""
        for stream in self._made.values():
            stream.file.close()
        self._made.clear()

    async def _make(self, weights: PublishedWeights, base: PublishedWeights | None) -> Stream:
        started = time.monotonic()
        try:
            stream = await asyncio.to_thread(_written, weights, base)
        except OSError as error:
            raise SetupError(
                f"cannot write {weights.manifest.num_bytes} bytes of weights, compressed, to {tempfile.gettempdir()}: "
                f"{error}; make room, or let TMPDIR name another folder"
            ) from None
        log.info(
            "pieces.written",
            version=weights.version,
            base_version=stream.base_version,
            size_bytes=stream.size_bytes,
            num_full_bytes=weights.manifest.num_bytes,
            elapsed_s=round(time.monotonic() - started, 3),
        )
        return stream


def _written(weights: PublishedWeights, base: PublishedWeights | None) -> Stream:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as the stream
    old = None if base is None else base.buckets
    try:
        size_bytes = write_pieces(file, weights.manifest, weights.buckets, old=old)
        file.flush()
    except BaseException:
        file.close()
        raise
    return Stream(file, size_bytes, 0 if base is None else base.version)
