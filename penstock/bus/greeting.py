"""What a nats-server says to every client, before TLS and token: who it is and what it can do."""

import asyncio
import json

_TIMEOUT_S = 2.0
_MAX_BYTES = 2**20


async def greeting_of(host: str, port: int) -> dict[str, object] | None:
    """Return the fields of the greeting of the nats-server at this address; None if none answers."""
    try:
        return await read_greeting(host, port, timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return None


async def read_greeting(host: str, port: int, *, timeout_s: float) -> dict[str, object] | None:
    """Return the fields of the greeting; None if the address cannot be reached or another program answers.

    Raises:
        TimeoutError: a program takes connections there and says nothing, as a nats-server that stands still.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_BYTES)
            line = await reader.readline()
        greeting = json.loads(line.removeprefix(b"INFO "))
    except TimeoutError:
        if writer is None:
            return None
        raise
    except (OSError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return greeting if isinstance(greeting, dict) else None
