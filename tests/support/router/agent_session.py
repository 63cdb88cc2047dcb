"""A session as a worker opens it, and OpenAI's clients of it at each router."""

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI

from penstock.bus.image_store import ImageStore
from penstock.bus.sessions import OpenedSession, Sessions
from penstock.records import GroupId, Sampling, SessionCall, SessionId, SessionState
from tests.support.router.openai_harness import HI, Harness
from tests.support.waiting import HANG_S


@dataclasses.dataclass(frozen=True)
class Agent:
    """One session and its clients."""

    harness: Harness
    sessions: Sessions
    opened: OpenedSession
    clients: list[AsyncOpenAI]
    """One for each router."""

    async def ask(self, messages: list[Any] = HI, *, router: int = 0, **options: Any) -> Any:
        """Ask a router."""
        return await self.clients[router].chat.completions.create(model="any", messages=messages, **options)

    async def calls(self) -> list[SessionCall]:
        """What is recorded."""
        return [call for _, call in await self.sessions.read(self.opened.id)]

    @contextlib.asynccontextmanager
    async def at(self, harness: Harness) -> AsyncIterator["Agent"]:
        """The same session at another harness's routers."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    AsyncOpenAI(base_url=f"{router.url}/sessions/{self.opened.id}/v1", api_key="none", timeout=HANG_S)
                )
                for router in harness.routers
            ]
            yield dataclasses.replace(self, harness=harness, clients=clients)


def group_id(run: str) -> GroupId:
    """Of a group that no other test has."""
    return GroupId(run_id=run, index=0, attempt=0, trainer_epoch=uuid.uuid4().hex[:12])


def state_of(group: GroupId, session: SessionId, **changes: Any) -> SessionState:
    """The state of a session that has just begun."""
    fields: dict[str, Any] = {
        "nonce": session.nonce,
        "group": group.message,
        "scope": group.scope,
        "sampling": Sampling(temperature=0.75, top_p=0.5, top_k=7, max_new_tokens=2000),
        "min_version": 3,
    }
    return SessionState(**(fields | changes))


@contextlib.asynccontextmanager
async def agent_session(harness: Harness, group: GroupId | None = None, **changes: Any) -> AsyncIterator[Agent]:
    """Open a session; `changes` are other values of its state."""
    group = group or group_id(harness.run)
    sessions, session = Sessions(harness.bus), SessionId.new(group, 0)
    await ImageStore(harness.bus).ensure()
    opened = await sessions.open(session, state_of(group, session, **changes))
    async with Agent(harness, sessions, opened, []).at(harness) as agent:
        yield agent
