"""Prompts are parsed off the event loop: short ones never wait for long ones, nor for clients that have left."""

import asyncio
import threading
from typing import Any

import pytest

from services.router.frontends.openai.parsing_threads import LONG_BYTES, NUM_THREADS, ParsingThreads


class Parser:
    """Stands for a parser; counts who uses it at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


async def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """However many long ones there are, and though none of them ends before it."""
    parsers: list[Any] = [Parser() for _ in range(NUM_THREADS)]
    threads, may_end = ParsingThreads(parsers), threading.Event()
    long = [
        asyncio.ensure_future(threads.run(lambda _: may_end.wait(20.0), size_bytes=LONG_BYTES))
        for _ in range(2 * NUM_THREADS)
    ]
    await asyncio.sleep(0)  # they are handed to the threads
    assert await threads.run(lambda _: "short", size_bytes=LONG_BYTES - 1) == "short"
    assert not any(each.done() for each in long)
    may_end.set()
    assert all(await asyncio.gather(*long))
    threads.close()


async def test_a_prompt_whose_client_left_before_its_turn_is_not_parsed() -> None:
    """The threads go on with those who wait."""
    threads, may_end, calls = ParsingThreads([Parser() for _ in range(NUM_THREADS)]), threading.Event(), []  # type: ignore[misc]
    running = [
        asyncio.ensure_future(threads.run(lambda _: may_end.wait(20.0), size_bytes=LONG_BYTES))
        for _ in range(NUM_THREADS - 1)
    ]
    await asyncio.sleep(0)
    left = asyncio.ensure_future(threads.run(lambda _: calls.append("left"), size_bytes=LONG_BYTES))
    stays = asyncio.ensure_future(threads.run(lambda _: calls.append("stays"), size_bytes=LONG_BYTES))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    may_end.set()
    await asyncio.gather(*running, stays)
    assert calls == ["stays"]
    threads.close()


async def test_no_parser_is_used_by_two_threads_at_once() -> None:
    """A tokenizer has state."""
    parsers: list[Any] = [Parser() for _ in range(NUM_THREADS)]
    threads = ParsingThreads(parsers)

    def parse(parser: Any) -> bool:
        if not parser.lock.acquire(blocking=False):
            return False
        parser.lock.release()
        return True

    sizes = [LONG_BYTES * (number % 2) for number in range(200)]
    assert all(await asyncio.gather(*(threads.run(parse, size_bytes=size) for size in sizes)))
    threads.close()
