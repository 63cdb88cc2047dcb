"""Agents for tests, as people write them: good ones and bad ones."""

import asyncio
import math
import threading
from typing import Any

from openai import AsyncOpenAI, OpenAI

from penstock.agents import AgentResult, AgentSession

released = threading.Event()
"""Lets the threads of `hang_in_a_thread` end with their test."""


async def ask(session: AgentSession, text: str = "hi", **options: Any) -> str:
    """One call of the policy."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model=session.model, messages=messages, **options)
    return answer.choices[0].message.content or ""


async def ask_once(session: AgentSession) -> float:
    """One call, which is not tried again."""
    await ask(session)
    return 1.0


async def stream_once(session: AgentSession) -> float:
    """One call, whose answer is read as it comes."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        async for _ in await client.chat.completions.create(
            model=session.model, messages=session.messages, stream=True
        ):
            pass
    return 1.0


async def leave_it_to_the_reward_service(session: AgentSession) -> None:
    """Show the row, and return nothing."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        await client.chat.completions.create(model=session.model, messages=session.messages)


def block(session: AgentSession) -> AgentResult:
    """A function that blocks, with a metric."""
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        client.chat.completions.create(model=session.model, messages=session.messages)
    return AgentResult(reward=0.25, metrics={"seed": session.task.seed % 2})


async def branch(session: AgentSession) -> float:
    """Two calls at once, then one that goes on with neither."""
    await asyncio.gather(ask(session, "left"), ask(session, "right"))
    await ask(session, "judge")
    return 1.0


async def raise_an_error(session: AgentSession) -> float:
    """Fail after a call."""
    await ask(session)
    raise KeyError("no such column")


async def return_nan(session: AgentSession) -> float:
    """A reward that is no number."""
    await ask(session)
    return math.nan


async def return_text(session: AgentSession) -> str:
    """What is no result."""
    return await ask(session)


async def cut_a_verdict_short(session: AgentSession) -> float:
    """Take an answer for wrong whose verdict it did not wait for."""
    asking = asyncio.create_task(session.task.grade(await ask(session)))
    await asyncio.sleep(0)  # it begins
    asking.cancel()
    return 0.0


async def hang(session: AgentSession) -> None:
    """Never end."""
    await ask(session)
    await asyncio.Event().wait()


def hang_in_a_thread(session: AgentSession) -> None:
    """Never end, in a way that cannot be cancelled."""
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        client.chat.completions.create(model=session.model, messages=session.messages)
    released.wait()


async def ask_nothing(session: AgentSession) -> float:
    """A reward for no work."""
    return 1.0
