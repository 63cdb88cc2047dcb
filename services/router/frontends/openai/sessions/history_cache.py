"""Caches the histories that a router has read, so that a session's next call reads only new answers.

Invariant: a history is updated from the bus before each use, so it includes the records of other routers. Cached
answers stay valid, because answers are only ever added to a session.
"""

import time
from collections import OrderedDict

from penstock.bus.sessions import Sessions
from penstock.records import SessionId
from services.router.frontends.openai.sessions.history import SessionHistory


class HistoryCache:
    """The most recently used histories."""

    def __init__(self, sessions: Sessions, *, max_bytes: int) -> None:
        """Read histories from `sessions`, and keep as many as fit into `max_bytes`, at least one."""
        self._sessions = sessions
        self._max_bytes = max_bytes
        self._histories: OrderedDict[str, SessionHistory] = OrderedDict()

    async def current(self, session: SessionId) -> SessionHistory:
        """Return the session's history, with all records.

        Raises:
            UnavailableError: the server does not answer.
        """
        name = str(session)
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = SessionHistory(known_since=time.monotonic())
        self._histories.move_to_end(name)
        for number, call in await self._sessions.read(session, after=history.last_number):
            history.add(number, call)
        num_bytes = sum(each.size_bytes for each in self._histories.values())
        while num_bytes > self._max_bytes and len(self._histories) > 1:
            num_bytes -= self._histories.popitem(last=False)[1].size_bytes
        return history

    def forget(self, session: SessionId) -> None:
        """Drop the history of a session that is over."""
        self._histories.pop(str(session), None)
