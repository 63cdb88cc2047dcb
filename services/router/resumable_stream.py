"""One call's answer while it comes, from one replica after another if need be. Pure.

Requests and chunks stay the bytes that they came as for as long as no replica fails: serialized messages of one type,
one after the other, are the serialized message with their lists joined, and that is read once, at the end.
"""

from google.protobuf.message import DecodeError

from penstock.clients.resumable import ResumableTurn
from penstock.errors import InvalidRequestError
from penstock.v1 import generate_pb2
from services.router.balancing import Query, hash_blocks


def read_query(raw: bytes, *, with_blocks: bool) -> Query:
    """What the serialized GenerateRequest wants; nothing else of it is kept, for images are large.

    Raises:
        InvalidRequestError: it is none, or one for no tokens, or half of a pair's.
    """
    try:
        request = generate_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequestError(f"{len(raw)} bytes are no GenerateRequest") from None
    if request.sampling.max_new_tokens < 1:  # what is left of a turn is counted by it
        raise InvalidRequestError(f"sampling.max_new_tokens = {request.sampling.max_new_tokens} must be at least 1")
    if request.HasField("bootstrap"):
        raise InvalidRequestError("bootstrap is for whoever pairs replicas; leave it out of calls to a router")
    contents = (image.stored.sha256.encode() or image.data for image in request.images)
    blocks = hash_blocks(request.input_ids, contents) if with_blocks else ()
    return Query(
        session_id=request.session_id,
        request_id=request.request_id,
        min_version=request.min_policy_version,
        blocks=blocks,
        num_tokens=len(request.input_ids) + 1,
    )


def is_last(chunk: bytes) -> bool:
    """Whether a serialized GenerateChunk ends its turn."""
    reason = generate_pb2.GenerateChunk.FromString(chunk).finish_reason
    return bool(reason != generate_pb2.FINISH_REASON_UNSPECIFIED)


class ResumableStream:
    """What was delivered of a turn. Play `leg`, `take` each chunk, `end_leg`; repeat until that says it is whole."""

    def __init__(self, raw: bytes, *, chunk_tokens: int = 0) -> None:
        """Nothing of the serialized GenerateRequest `raw` was played; `chunk_tokens` above 0 overrides its own."""
        self._raw = raw
        self._chunking = generate_pb2.GenerateRequest(chunk_tokens=chunk_tokens).SerializeToString()
        self._first_chunks: list[bytes] = []
        self._continuation: ResumableTurn | None = None
        self.leg = raw + self._chunking
        """The serialized request to play next."""

    @property
    def num_tokens(self) -> int:
        """Tokens delivered up to the last `end_leg`."""
        return 0 if self._continuation is None else self._continuation.num_tokens

    def take(self, chunk: bytes) -> bytes:
        """Take a chunk that the leg delivered; return it as the caller should see it.

        Raises:
            PenstockError: the chunk breaks the contract of GenerateStream. In the first leg `end_leg` says so.
        """
        if self._continuation is None:
            self._first_chunks.append(chunk)
            return chunk
        message = generate_pb2.GenerateChunk.FromString(chunk)
        self._continuation.relay(message)
        return message.SerializeToString()

    def end_leg(self) -> bool:
        """The leg has ended, well or not. Returns whether the answer is whole; if not, `leg` is what is left to play.

        Raises:
            PenstockError: what the replica sent breaks the contract of GenerateStream.
        """
        if self._continuation is None:
            self._continuation = ResumableTurn(generate_pb2.GenerateRequest.FromString(self._raw))
            if self._first_chunks:
                self._continuation.add(generate_pb2.GenerateChunk.FromString(b"".join(self._first_chunks)))
            if not self._continuation.is_finished:
                self._continuation.remaining()  # the leg that has been played: the next is told apart by name
        if self._continuation.is_finished:
            return True
        self.leg = self._continuation.remaining().SerializeToString() + self._chunking
        return False

    def response(self) -> bytes:
        """The whole turn, as a serialized GenerateResponse; only after `end_leg` said that it is whole."""
        assert self._continuation is not None
        return self._continuation.response().SerializeToString()
