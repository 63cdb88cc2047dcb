"""An engine that ends before it has said what it holds."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import UnavailableError
from services.rollout.engine import server
from services.rollout.engine.server import _open


class Silent:
    """SGLang, of which a process has ended, answers nobody."""

    async def open(self) -> None:
        """Wait for an answer."""
        await asyncio.Event().wait()


async def test_an_engine_that_dies_before_its_first_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its end was noticed or not; it would neither serve nor be started again."""
    receiver: Any = Silent()
    engine: Any = SimpleNamespace(died=asyncio.Event(), death="one of SGLang's processes ended")
    opening = asyncio.create_task(_open(receiver, engine))
    await asyncio.sleep(0)
    engine.died.set()
    with pytest.raises(UnavailableError, match="one of SGLang's processes ended"):
        await opening
    monkeypatch.setattr(server, "_OPEN_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
        await _open(receiver, SimpleNamespace(died=asyncio.Event()))  # type: ignore[arg-type]
