"""A day's worth of items: does anything grow?"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator

from bench.reward.items import Question, typical
from bench.reward.report import Report
from bench.reward.service_process import ServiceProcess
from bench.reward.stored_items import hostile_items
from penstock.clients import RewardClient
from penstock.v1 import reward_pb2

_BATCH = 500
_HOSTILE_BATCH = 20
_IN_FLIGHT = 4
_GROWTH_BAR = 0.05
_ROUNDS = 10
_REST_S = 2.0
_NUM_BATCHES = 50
_KILLED = (reward_pb2.VERDICT_STATUS_TIMEOUT, reward_pb2.VERDICT_STATUS_OUT_OF_MEMORY)
_PROFILES = ("math", "math_verify")
"""Profiles of hostile items: math refuses most of them, math_verify keeps workers busy until they are killed."""


def hostile_questions(report: Report) -> list[Question]:
    """Return questions that hang or bloat verifiers, except bodies of megabytes."""
    items = [item for item in hostile_items(report) if len(item.gold) + len(item.response) < 10_000]
    return [Question(golds=(item.gold,), response=item.response) for item in items]


async def measure(
    report: Report,
    *,
    hostile: list[Question],
    num_fast: int,
    num_hostile: int,
    hostile_deadline_s: float,
) -> None:
    """Send both kinds at once in ten rounds, and measure the service at rest after each."""
    soak = _Soak(hostile, hostile_deadline_s)
    rows: list[tuple[object, ...]] = []
    samples: list[dict[str, float]] = []
    started = time.perf_counter()
    with ServiceProcess() as service:
        async with RewardClient(service.address) as client:
            for _ in range(_ROUNDS):
                async with asyncio.TaskGroup() as group:
                    group.create_task(soak.send_hostile(client, num_hostile // _ROUNDS))
                    numbers = iter(range(num_fast // _ROUNDS // _BATCH))
                    for _ in range(_IN_FLIGHT):
                        group.create_task(soak.send_fast(client, numbers))
                await asyncio.sleep(_REST_S)
                samples.append(
                    {
                        "server memory": float(service.server_memory_bytes()),
                        "memory": float(service.memory_bytes()),
                        "files": float(service.num_fds()),
                        "processes": float(service.num_processes()),
                    }
                )
                rows.append(
                    (
                        soak.num_fast,
                        soak.num_hostile,
                        soak.num_killed,
                        f"{time.perf_counter() - started:.0f}",
                        f"{samples[-1]['server memory'] / 1e6:.1f}",
                        f"{service.server_own_memory_bytes() / 1e6:.1f}",
                        f"{samples[-1]['memory'] / 1e6:.1f}",
                        *(f"{samples[-1][key]:.0f}" for key in ("files", "processes")),
                    )
                )
    report.table(
        f"Soak: {soak.num_fast} typical items and {soak.num_hostile} hostile ones",
        ("items", "hostile", "workers killed", "after s", "server MB", "its own MB", "all MB", "files", "processes"),
        rows,
        note=f"Hostile items have a deadline of {hostile_deadline_s} s. Memory is PSS, at rest after each tenth. What "
        "is not the server's own is its share of mapped files, which grows where other programs that map them end.",
    )
    early, late = samples[1:4], samples[-3:]
    growth = {key: _mean(late, key) / _mean(early, key) - 1 for key in samples[0]}
    told = ", ".join(f"{key} {value:+.1%}" for key, value in growth.items())
    report.bar(
        "a day's worth of items leaks nothing: less than 5% more in the last three tenths than in the second to fourth",
        holds=all(value < _GROWTH_BAR for value in growth.values()) and soak.num_changed == 0,
        measured=f"{told}; verdicts that were another the first time: {soak.num_changed}",
    )


class _Soak:
    """The items to send, and the number done."""

    def __init__(self, hostile: list[Question], deadline_s: float) -> None:
        self.num_fast = 0
        self.num_hostile = 0
        self.num_killed = 0
        self.num_changed = 0
        self._hostile = itertools.cycle(list(itertools.product(hostile, _PROFILES)))
        self._deadline_s = deadline_s
        self._batches = [
            [question.to_proto(item_id=str(index)) for index, question in enumerate(typical(_BATCH, seed=seed))]
            for seed in range(_NUM_BATCHES)
        ]
        self._scores: dict[int, list[float]] = {}

    async def send_fast(self, client: RewardClient, numbers: Iterator[int]) -> None:
        """Send a batch for each of `numbers`."""
        for number in numbers:
            which = number % _NUM_BATCHES
            verdicts = await client.verify_batch(
                self._batches[which], timeout_s=600, retry_until=time.monotonic() + 600
            )
            scores = [verdict.score for verdict in verdicts]
            first = self._scores.setdefault(which, scores)
            self.num_changed += sum(one != other for one, other in zip(first, scores, strict=True))
            self.num_fast += _BATCH

    async def send_hostile(self, client: RewardClient, count: int) -> None:
        """Send `count` hostile items, few at a time."""
        for _ in range(count // _HOSTILE_BATCH):
            items = [
                question.to_proto(item_id=str(index), deadline_s=self._deadline_s, profile=profile)
                for index, (question, profile) in enumerate(itertools.islice(self._hostile, _HOSTILE_BATCH))
            ]
            verdicts = await client.verify_batch(items, timeout_s=600, retry_until=time.monotonic() + 600)
            self.num_killed += sum(verdict.status in _KILLED for verdict in verdicts)
            self.num_hostile += _HOSTILE_BATCH


def _mean(samples: list[dict[str, float]], key: str) -> float:
    return statistics.mean(sample[key] for sample in samples)
