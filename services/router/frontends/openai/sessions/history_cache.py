"""Caches the histories that a router has read, so that a session's next call reads only new answers.

Invariant: a history is updated from the bus before each use, so it includes the records of other routers. Cached
answers stay valid, because answers are only ever added to a session.
"""

from collections import OrderedDict

from penstock.bus.sessions import Sessions
from penstock.records import SessionId
from services.router.frontends.openai.sessions.history import SessionHistory

_OVERHEAD_BYTES = 1024
"""What a history takes beside the tokens of its answers: a session of one call has none."""


class HistoryCache:
    """The most recently used histories."""

    def __init__(self, sessions: Sessions, *, max_bytes: int) -> None:
        """Read histories from `sessions`, and keep as many as fit into `max_bytes`, at least one."""
        self._sessions = sessions
        self._max_bytes = max_bytes
        self._histories: OrderedDict[str, SessionHistory] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """Bytes that each of them counts for."""
        self._num_bytes = 0

    def known_since(self, session: SessionId, began: float) -> float:
        """Return since when the session is known, by `time.monotonic()`: since `began` if its history is not cached."""
        history = self._histories.get(str(session))
        return began if history is None else history.known_since

    async def current(self, session: SessionId, known_since: float) -> SessionHistory:
        """Return the session's history, with all records; if it is not cached, it is known since `known_since`.

        Raises:
            UnavailableError: the server does not answer.
        """
        name = str(session)
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = SessionHistory(known_since=known_since)
        self._histories.move_to_end(name)
        for number, call in await self._sessions.read(session, after=history.last_number):
            history.add(number, call)
        if self._histories.get(name) is history:  # it may have been dropped meanwhile
            self._count(name, history.size_bytes + _OVERHEAD_BYTES)
        while self._num_bytes > self._max_bytes and len(self._histories) > 1:
            oldest, _ = self._histories.popitem(last=False)
            self._count(oldest, 0)
        return history

    def forget(self, session: SessionId) -> None:
        """Drop the history of a session that is over."""
        if self._histories.pop(str(session), None) is not None:
            self._count(str(session), 0)

    def _count(self, name: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._sizes.pop(name, 0)
        if num_bytes:
            self._sizes[name] = num_bytes
