"""A reward service with real worker processes, and what tests look at and wait for."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.clients import RewardClient
from penstock.v1 import reward_pb2
from services.reward.admission_queue import MAX_ITEMS
from services.reward.config import MAX_DEADLINE_S, RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.server import MAX_OVERTIME, running

OK = reward_pb2.VERDICT_STATUS_OK
TIMEOUT = reward_pb2.VERDICT_STATUS_TIMEOUT
OUT_OF_MEMORY = reward_pb2.VERDICT_STATUS_OUT_OF_MEMORY

# No exact tier decides these; the first takes a worker milliseconds, the second for ever.
EASY = (r"\frac{1}{x+1}", r"\boxed{(1+x)^{-1}}")
HANGS = (r"\int \frac{\sin x}{x^5+e^x} dx", r"\boxed{\int \frac{\cos x}{x^5+e^x} dx}")


def item_of(
    gold: str, response: str, *, item_id: str = "", profile: str = "math", deadline_s: float = 0.0
) -> reward_pb2.VerifyItem:
    """An item with one gold answer."""
    return reward_pb2.VerifyItem(
        item_id=item_id, golds=[gold], response=response, profile=profile, deadline_s=deadline_s
    )


def parent_of(pid: int) -> int:
    """The process id of its parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.asynccontextmanager
async def reward_service(
    *,
    max_overtime: int = MAX_OVERTIME,
    max_items: int = MAX_ITEMS,
    grace_s: float = 5.0,
    **settings: object,
) -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    """A service with two workers, whose items have time on a busy machine too, and a client of it."""
    config = RewardConfig.model_validate({"workers": 2, "deadline_s": MAX_DEADLINE_S, **settings})
    service = running(config, grace_s=grace_s, max_overtime=max_overtime, max_items=max_items)
    async with service as (server, pool, _), RewardClient(server.address) as client:
        yield client, pool


def end_items(pool: WorkerPool) -> None:
    """End the items at work as OUT_OF_MEMORY, as if they had grown too large: a deadline may come too early."""
    for worker in pool._busy:
        pool._condemned.add(worker)
        worker.kill()


def easy_item(item_id: str = "") -> reward_pb2.VerifyItem:
    """An item that takes a worker milliseconds."""
    return item_of("5", r"\boxed{5}", item_id=item_id, profile="math_verify", deadline_s=MAX_DEADLINE_S)


def hanging_item(item_id: str = "", *, deadline_s: float = 30.0) -> reward_pb2.VerifyItem:
    """An item that takes a worker for ever."""
    return item_of("5", r"\boxed{10000000!}", item_id=item_id, profile="math_verify", deadline_s=deadline_s)
