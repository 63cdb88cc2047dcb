"""Threads for templates and tokenizers, which take milliseconds for most prompts and seconds for long ones.

Invariants: a short prompt never waits for a long one. A prompt whose client left before its turn is not parsed. Each
thread has its own parser, because a tokenizer has state.
"""

import asyncio
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.router.frontends.openai.parsing.text_sizes import LONG_BYTES
from services.router.frontends.openai.request_parser import RequestParser

ResultT = TypeVar("ResultT")

NUM_THREADS = 3
"""One for short prompts, two for long ones; each holds a copy of the tokenizer, tens of MB for a large vocabulary."""


class _Lane:
    """A pool with one thread per parser."""

    def __init__(self, parsers: Sequence[RequestParser], name: str) -> None:
        self.threads = ThreadPoolExecutor(len(parsers), thread_name_prefix=name)
        self._free: queue.SimpleQueue[RequestParser] = queue.SimpleQueue()
        for parser in parsers:
            self._free.put(parser)

    def call(self, parse: Callable[[RequestParser], ResultT]) -> ResultT:
        parser = self._free.get()
        try:
            return parse(parser)
        finally:
            self._free.put(parser)


class ParsingThreads:
    """Runs parsing off the event loop. Close it after use."""

    def __init__(self, parsers: Sequence[RequestParser]) -> None:
        """Use `NUM_THREADS` parsers, each in one thread at a time."""
        self._short = _Lane(parsers[:1], "parse-short")
        self._long = _Lane(parsers[1:], "parse-long")

    async def run(self, parse: Callable[[RequestParser], ResultT], *, size_bytes: int) -> ResultT:
        """Return the result of `parse` for a text of `size_bytes`; do not call it if cancelled before its turn."""
        lane = self._short if size_bytes < LONG_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(lane.threads, lane.call, parse)

    def close(self) -> None:
        """End the threads; drop waiting calls."""
        for lane in (self._short, self._long):
            lane.threads.shutdown(wait=False, cancel_futures=True)
