"""What HTTP requests cost the service in memory: many large ones at once, to a service that is a process of its own."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.reward.config import MAX_DEADLINE_S
from services.reward.server import MAX_OVERTIME
from tests.support.reward import misbehaving_verifiers
from tests.support.reward.process import RewardProcess, reward_process
from tests.support.waiting import until

_MAX_BODY_MB = 8
_BOUND_MB = 192
"""Of growth at its peak: 16 MiB of bodies, 10 times that once they are read, and what the allocator keeps. Without a
bound, 24 texts of 4 MiB would take 400."""
_NUM_CLIENTS = 24
_MOST_HELD = 3
"""Texts of 4 MiB, in the seven eighths of 16 MiB that are for large ones."""
_RIGHT = {"golds": ["5"], "response": r"\boxed{5}", "profile": "math"}
_SLEEPS = {"golds": ["5"], "response": "sleep", "profile": "asleep", "deadline_s": MAX_DEADLINE_S}
_TEXT = json.dumps({"label": "5", "response": "x" * 4 * 2**20 + r"\boxed{5}"}).encode()


@pytest.fixture
def service() -> Iterator[RewardProcess]:
    """A service whose HTTP requests may hold 16 MiB."""
    settings = {
        "workers": 1,
        "deadline_s": 30,
        "http_max_body_mb": _MAX_BODY_MB,
        "verifiers.asleep": f"{Path(misbehaving_verifiers.__file__)}:verify",
    }
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

        async def workers_busy() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("penstock_reward_workers_busy "))

        assert (await ask(_RIGHT)).json()["score"] == 1.0
        before_mb = _peak_mb(service)
        answer = await _post(client, "/v1/verify", bytes(_MAX_BODY_MB * 2**20 + 1))
        assert answer.status_code == 413
        peaks = [_peak_mb(service) - before_mb]

        hanging = [asyncio.create_task(ask(_SLEEPS)) for _ in range(1 + MAX_OVERTIME)]

        async def all_hang() -> bool:
            return await workers_busy() == len(hanging)

        await until(all_hang)
        sent = [asyncio.create_task(_post(client, "/slime?profile=math_verify", _TEXT)) for _ in range(_NUM_CLIENTS)]
        await until(lambda: sum(task.done() for task in sent) >= _NUM_CLIENTS - _MOST_HELD)
        assert (await ask(_RIGHT)).json()["score"] == 1.0
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        answers = await asyncio.gather(*sent)
        peaks += [_peak_mb(service) - before_mb]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert _NUM_CLIENTS - _MOST_HELD <= len(refused) < _NUM_CLIENTS
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert {answer.json() for answer in answers if answer.status_code == 200} == {1.0}
        assert (await _post(client, "/slime?profile=math_verify", _TEXT)).json() == 1.0
    assert max(peaks) < _BOUND_MB
