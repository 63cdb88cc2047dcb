"""The answer to one call while it streams, from several replicas in turn if needed. Pure.

While no replica fails, requests and chunks stay the received bytes. Serialized messages of one type, concatenated, are
the serialized message with their lists joined; it is parsed once, at the end. Invariant: the request is kept once; each
attempt's request is made when it is sent.
"""

from google.protobuf.message import DecodeError

from penstock.clients.pd_pair import reports_prompt
from penstock.clients.resumable import ResumableTurn
from penstock.errors import InvalidRequestError, PenstockError
from penstock.v1 import generate_pb2
from services.router.balancing import Query, hash_blocks


def read_query(raw: bytes, *, with_blocks: bool) -> Query:
    """Read the needs of the serialized GenerateRequest. Nothing else of it is kept, because images are large.

    Raises:
        InvalidRequestError: it is not a GenerateRequest, asks for no tokens, or is one part of a PD pair's call.
    """
    try:
        request = generate_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequestError(f"{len(raw)} bytes are not a GenerateRequest") from None
    if request.sampling.max_new_tokens < 1:  # the rest of a turn is counted against it
        raise InvalidRequestError(f"sampling.max_new_tokens = {request.sampling.max_new_tokens} must be at least 1")
    if request.HasField("bootstrap"):
        raise InvalidRequestError("bootstrap is set by routers; leave it out of calls to a router")
    blocks: tuple[int, ...] = ()
    shared = 0
    if with_blocks or request.group_id:
        contents = [image.stored.sha256.encode() or image.data for image in request.images]
        blocks = hash_blocks(request.input_ids, contents) if with_blocks else ()
        shared = hash((request.group_id, *request.input_ids, *contents)) if request.group_id else 0
    return Query(
        session_id=request.session_id,
        group_id=request.group_id,
        shared_prompt=shared,
        request_id=request.request_id,
        min_version=request.min_policy_version,
        exact_version=request.exact_policy_version,
        reports_prompt=reports_prompt(request),
        blocks=blocks,
        num_tokens=len(request.input_ids) + 1,  # at least: images are one token each until a replica expands them
    )


class ResumableStream:
    """One call (`penstock.clients.turn.TurnProgress` over bytes)."""

    def __init__(self, *parts: bytes, chunk_tokens: int = 0, may_restart: bool = False) -> None:
        """Begin the call of a serialized GenerateRequest.

        Args:
            parts: The bytes of the request; calls may share parts.
            chunk_tokens: Above 0: overrides the request's own.
            may_restart: See `ResumableTurn`; the caller ignores the chunks and reads the `response`.
        """
        self._parts = parts
        self._chunk_tokens = chunk_tokens
        self._may_restart = may_restart
        self._first_chunks: list[bytes] = []
        self._turn: ResumableTurn | None = None
        self._breach: PenstockError | None = None
        """Why no replica can continue from the tokens that the caller has; None: they are valid."""

    @property
    def size_bytes(self) -> int:
        """Memory that the request takes."""
        return sum(len(part) for part in self._parts)

    @property
    def num_tokens(self) -> int:
        """Tokens delivered up to the last `end_attempt`."""
        return 0 if self._turn is None else self._turn.num_tokens

    def read_query(self, *, with_blocks: bool) -> Query:
        """Read the call's needs; see the function `read_query`."""
        return read_query(self._raw(), with_blocks=with_blocks)

    def require_continuable(self) -> None:
        """Check that another replica can continue from the tokens delivered so far.

        Raises:
            PenstockError: it cannot, also because some of them break the contract of GenerateStream.
        """
        if self._breach is not None:
            raise self._breach
        if self._turn is not None:
            self._turn.require_continuable()

    def make_request(self, bootstrap: generate_pb2.Bootstrap | None) -> bytes:
        """Return the serialized request of the next attempt."""
        added = generate_pb2.GenerateRequest(chunk_tokens=self._chunk_tokens, bootstrap=bootstrap)
        raw = self._raw() if self._turn is None else self._turn.remaining().SerializeToString()
        return raw + added.SerializeToString()  # no copy if nothing is added

    def is_last(self, chunk: bytes) -> bool:
        """Return whether this serialized GenerateChunk is the last."""
        reason = generate_pb2.GenerateChunk.FromString(chunk).finish_reason
        return bool(reason != generate_pb2.FINISH_REASON_UNSPECIFIED)

    def take(self, chunk: bytes) -> bytes:
        """Take an attempt's chunk; return it as the caller should see it.

        Raises:
            PenstockError: the chunk breaks the contract of GenerateStream. In the first attempt `end_attempt` raises.
        """
        if self._turn is None:
            self._first_chunks.append(chunk)
            return chunk
        return self._turn.take(generate_pb2.GenerateChunk.FromString(chunk)).SerializeToString()

    def end_attempt(self) -> bool:
        """End the attempt, successful or not; return whether the answer is complete.

        Raises:
            PenstockError: the replica's chunks break the contract of GenerateStream.
        """
        if self._turn is None:
            request = generate_pb2.GenerateRequest.FromString(self._raw())
            self._turn = ResumableTurn(request, may_restart=self._may_restart)
            chunks, self._first_chunks, self._parts = b"".join(self._first_chunks), [], ()
            try:
                if chunks:
                    self._add_first(self._turn, generate_pb2.GenerateChunk.FromString(chunks))
            finally:
                if not self._turn.is_finished:
                    self._turn.remaining()  # stands for the finished attempt, so that the next gets its own id
        return self._turn.end_attempt()

    def response(self) -> bytes:
        """Return the whole turn as a serialized GenerateResponse; only after `end_attempt` returned true."""
        assert self._turn is not None
        return self._turn.response().SerializeToString()

    def _add_first(self, turn: ResumableTurn, chunk: generate_pb2.GenerateChunk) -> None:
        """Add the first attempt's chunks, joined; the caller has them already, valid or not."""
        try:
            turn.add(chunk)
        except PenstockError as breach:
            if chunk.output_ids and not self._may_restart:
                self._breach = PenstockError(f"{breach}; its tokens were passed on already, so ask again")
            raise

    def _raw(self) -> bytes:
        return b"".join(self._parts)  # no copy of a single part
