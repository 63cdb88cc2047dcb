"""How many histories of sessions a router keeps."""

from typing import Any

from penstock.records import SessionId
from services.router.frontends.openai.sessions.history_cache import HistoryCache


class Nothing:
    """No session has a known answer."""

    def __init__(self) -> None:
        self.num_read = 0

    async def read(self, session: SessionId, *, after: int) -> list[Any]:
        self.num_read += 1
        return []


def session(number: int) -> SessionId:
    """One of many."""
    return SessionId(sample_key=f"s-{number}", nonce="n")


async def test_sessions_of_one_call_take_their_share_of_the_room() -> None:
    """Their answer is never read, so that their tokens take none; the newest stay."""
    cache: Any = HistoryCache(Nothing(), max_bytes=100 * 2**10)  # type: ignore[arg-type]
    kept = [await cache.current(session(number), 0.0) for number in range(1000)]
    assert 10 < len(cache._histories) <= 100
    assert await cache.current(session(999), 0.0) is kept[999]
    assert await cache.current(session(0), 0.0) is not kept[0]


async def test_what_is_forgotten_takes_no_room() -> None:
    """However often sessions come and go."""
    cache: Any = HistoryCache(Nothing(), max_bytes=100 * 2**10)  # type: ignore[arg-type]
    first = await cache.current(session(0), 0.0)
    for number in range(1, 1000):
        await cache.current(session(number), 0.0)
        cache.forget(session(number))
        cache.forget(session(number))
    assert await cache.current(session(0), 0.0) is first
