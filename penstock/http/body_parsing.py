"""Parses the bodies of requests, large ones in threads of their own.

Invariant: a body counts in `penstock.http.body` as long as a thread holds the body or what the thread has made of it.
So a cancelled request ends only once its thread has ended.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import FastAPI, Request

_LARGE_BYTES = 256 * 2**10
"""Bodies of this size or more take more than about 20 ms to parse."""
_NUM_THREADS = 2
"""Parsers hold the GIL for most of their time: more threads would only slow down the event loop."""

ValueT = TypeVar("ValueT")


class _Parsers:
    """The threads of an application."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS)
        self._free = asyncio.Semaphore(_NUM_THREADS)
        """Bodies wait here: in the queue of `_threads` those of cancelled requests would stay."""

    async def run(self, parse: Callable[[bytes], ValueT], body: bytes) -> ValueT:
        async with self._free:
            parsing = asyncio.get_running_loop().run_in_executor(self._threads, parse, body)
            try:
                return await asyncio.shield(parsing)
            except asyncio.CancelledError:
                await asyncio.wait({parsing})
                if not parsing.cancelled():
                    parsing.exception()  # nobody reads what is wrong with the body
                raise


def prepare_parsing(app: FastAPI) -> None:
    """Give the application the threads for `parse_body`, which end with it."""
    app.state.parsers = _Parsers()


async def parse_body(request: Request, parse: Callable[[bytes], ValueT]) -> ValueT:
    """Return what `parse` makes of the request's body; it is called in a thread if the body is large."""
    body = await request.body()
    if len(body) < _LARGE_BYTES:
        return parse(body)
    parsers: _Parsers = request.app.state.parsers
    return await parsers.run(parse, body)
