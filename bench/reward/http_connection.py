"""One kept-alive HTTP/1.1 connection: general clients cost more than the service, and would dominate the numbers."""

import asyncio
import json
from typing import Any


class HttpConnection:
    """Posts JSON, one request at a time."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> None:
        """Connect."""
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post `body` and return the answer's body; any status but 200 is an error."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        content = await self._reader.readexactly(length)
        if " 200 " not in answer.partition("\r\n")[0]:
            raise RuntimeError(f"{answer.splitlines()[0]}: {content[:200]!r}")
        return json.loads(content)
