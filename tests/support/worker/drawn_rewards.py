"""An agent whose rewards differ between the texts of any policy, a random one too, whose answers are cut by length."""

import zlib

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from penstock.agents import AgentSession


async def play(session: AgentSession) -> float:
    """Ask once, and reward the text by its checksum: with 0, 1, 2 or 3 quarters."""
    http_client = DefaultAsyncHttpxClient(verify=session.tls or True)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http_client) as client:
        answer = await client.chat.completions.create(model=session.model, messages=session.messages)
    return zlib.crc32((answer.choices[0].message.content or "").encode()) % 4 / 4
