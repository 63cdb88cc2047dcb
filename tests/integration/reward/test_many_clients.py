"""A thousand clients at once: nothing is lost, and every answer is the asker's own."""

import asyncio
import resource
from collections.abc import Iterator

import aiohttp
import grpc
import pytest

from penstock.v1 import reward_pb2, reward_pb2_grpc
from tests.support.reward.process import RewardProcess, reward_process

NUM_CLIENTS = 1000


@pytest.fixture(scope="module")
def service() -> Iterator[RewardProcess]:
    """A service in a process of its own, which like this one may open a few thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted) if soft != resource.RLIM_INFINITY else soft, hard))
    with reward_process("--reward.workers=2") as process:
        yield process
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def response_of(number: int) -> str:
    """Right for even numbers, wrong for odd ones."""
    return rf"so it is \boxed{{{number + number % 2}}}"


@pytest.mark.slow
async def test_over_grpc(service: RewardProcess) -> None:
    """Each with a connection of its own, and two calls on it."""

    async def client(number: int) -> list[tuple[str, float, str]]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            item = reward_pb2.VerifyItem(
                item_id=str(number), golds=[str(number)], response=response_of(number), profile="math"
            )
            verdicts = []
            for _ in range(2):
                response = await stub.Verify(reward_pb2.VerifyRequest(item=item), timeout=60, wait_for_ready=True)
                verdict = response.verdict
                verdicts.append((verdict.item_id, verdict.score, verdict.extracted))
            return verdicts

    answers = await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    assert answers == [
        [(str(number), float(number % 2 == 0), str(number + number % 2))] * 2 for number in range(NUM_CLIENTS)
    ]


@pytest.mark.slow
async def test_over_http(service: RewardProcess) -> None:
    """Each with a connection of its own, and two requests on it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(service.url, connector=connector) as http:

        async def client(number: int) -> list[tuple[str, float, str]]:
            item = {"item_id": str(number), "golds": [str(number)], "response": response_of(number), "profile": "math"}
            verdicts = []
            for _ in range(2):
                async with http.post("/v1/verify", json=item, timeout=aiohttp.ClientTimeout(60)) as response:
                    assert response.status == 200
                    verdict = await response.json()
                verdicts.append((verdict["item_id"], verdict["score"], verdict["extracted"]))
            return verdicts

        answers = await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    assert answers == [
        [(str(number), float(number % 2 == 0), str(number + number % 2))] * 2 for number in range(NUM_CLIENTS)
    ]
