"""What HTTP requests cost the service in memory: many large ones at once, to a service that is a process of its own."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.reward_process import RewardProcess, reward_process
from tests.waiting import until

_ROOM_MB = 64
_BOUND_MB = 3 * _ROOM_MB
"""Of growth at its peak: beside the room there is a refused body while it is looked at, and what the allocator keeps.
Without a room, the nested lists alone take 700."""
_NUM_CLIENTS = 24
_MOST_HELD = 3
"""Texts of 4 MiB, which count 16 each, in the seven eighths that are for large ones."""
_RIGHT = {"golds": ["5"], "response": r"\boxed{5}", "profile": "math"}
_HANGS = {"golds": ["5"], "response": r"\boxed{10000000!}", "profile": "math_verify", "deadline_s": 30.0}
_TEXT = json.dumps({"label": "5", "response": "x" * 4 * 2**20 + r"\boxed{5}"}).encode()
_COSTLY = {
    "empty lists": b"[" + b"[]," * 2**22 + b"0]",
    "nested lists": b"[" + b"[[[[[[[[]]]]]]]]," * 2**20 + b"0]",
    "objects": b"[" + b'{"a":"bc"},' * 2**20 + b"0]",
    "gold answers": b'{"profile":"math","response":"","golds":[' + b'"ab",' * 2**21 + b'""]}',
    "numbers": b'{"response":"","label":[' + b"10," * 2**22 + b"0]}",
}


@pytest.fixture
def service() -> Iterator[RewardProcess]:
    """A service whose HTTP requests may take 64 MiB."""
    settings = {"workers": 1, "max_overtime": 0, "http_memory_mb": _ROOM_MB}
    with reward_process(*(f"--reward.{key}={value}" for key, value in settings.items())) as process:
        yield process


def _peak_mb(process: RewardProcess) -> float:
    """The most memory that the server process ever had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def _post(client: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    return await client.post(path, content=body, headers={"Content-Type": "application/json"})


async def test_large_bodies_take_no_more_than_their_room(service: RewardProcess) -> None:
    """Those that never fit are refused before they are read, those that do not fit now come back; small ones go on."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60.0, limits=httpx.Limits()) as client:

        async def ask(item: dict[str, object]) -> httpx.Response:
            return await _post(client, "/v1/verify", json.dumps(item).encode())

        assert (await ask(_RIGHT)).json()["score"] == 1.0
        before_mb = _peak_mb(service)
        for kind, body in _COSTLY.items():
            answer = await _post(client, "/v1/verify", body)
            assert answer.status_code == 413, kind
            assert "of memory once it is read" in answer.json()["error"]["message"]
        peaks = [_peak_mb(service) - before_mb]

        hanging = asyncio.create_task(ask(_HANGS))
        await asyncio.sleep(0.5)
        sent = [asyncio.create_task(_post(client, "/slime?profile=math_verify", _TEXT)) for _ in range(_NUM_CLIENTS)]
        await until(lambda: sum(task.done() for task in sent) >= _NUM_CLIENTS - _MOST_HELD, timeout_s=60.0)
        assert (await ask(_RIGHT)).json()["score"] == 1.0
        assert not hanging.done()
        hanging.cancel()
        answers = await asyncio.gather(*sent)
        peaks += [_peak_mb(service) - before_mb]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert _NUM_CLIENTS - _MOST_HELD <= len(refused) < _NUM_CLIENTS
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert {answer.json() for answer in answers if answer.status_code == 200} == {1.0}
        assert (await _post(client, "/slime?profile=math_verify", _TEXT)).json() == 1.0
    assert max(peaks) < _BOUND_MB
