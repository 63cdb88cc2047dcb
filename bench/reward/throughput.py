"""Throughput per core: items without a worker process, items that need one, and the peers on the same items."""

import statistics
import time

from bench.reward.items import Question, symbolic, typical
from bench.reward.peers import PEERS, Peer
from bench.reward.report import Report
from bench.reward.service_process import ServiceProcess
from penstock.clients import RewardClient
from services.reward.config import RewardConfig
from services.reward.item import Item
from services.reward.profiles.profile import Undecided
from services.reward.profiles.registry import make_profiles
from services.reward.verdict import Finding

_TIER_1_BAR = 10_000
_TIER_3_BAR = 250
_COLUMNS = ("verifier", "items", "items/s", "called right")
_PROFILE = "geo3k"
_ROUNDS = 5


async def measure(report: Report, *, num_typical: int, num_symbolic: int) -> None:
    """Print both tables."""
    rate, num_right, num_undecided = _decide(num_typical)
    # The peers take milliseconds per item; a twentieth of the items is enough for them.
    fewer = typical(max(200, num_typical // 20), seed=1)
    report.table(
        "Numbers: one thread, no worker process (tier 1)",
        _COLUMNS,
        [(f"penstock {_PROFILE}", num_typical, f"{rate:.0f}", f"{num_right / num_typical:.3f}"), *_peers(fewer)],
        note=f"Responses of 300 to 600 characters; {num_undecided} of {num_typical} were left to a worker process. "
        f"Penstock's rate is the median of {_ROUNDS} rounds of new items.",
    )
    report.bar(f"tier 1 >= {_TIER_1_BAR} items/s per core", holds=rate >= _TIER_1_BAR, measured=f"{rate:.0f} items/s")

    questions = [question for question in symbolic(8 * num_symbolic) if _is_undecided(question)][:num_symbolic]
    rate, share = await _ask_one_worker(questions)
    report.table(
        "Expressions: one worker process (tier 3)",
        _COLUMNS,
        [
            (f"penstock {_PROFILE}", len(questions), f"{rate:.0f}", f"{share:.3f}"),
            *_peers(questions[: max(100, len(questions) // 4)]),
        ],
        note="What no exact value and no structure decides; penstock through gRPC, peers by a call in their process.",
    )
    report.bar(f"tier 3 >= {_TIER_3_BAR} items/s per core", holds=rate >= _TIER_3_BAR, measured=f"{rate:.0f} items/s")


def _decide(num_questions: int) -> tuple[float, int, int]:
    """Return items per second over rounds of new items, how many were right, and how many undecided."""
    profile = make_profiles(RewardConfig(), {})[_PROFILE]
    rates, num_right, num_undecided = [], 0, 0
    for seed in range(_ROUNDS + 1):
        questions = typical(num_questions // _ROUNDS, seed=seed)
        items = [Item(golds=one.golds, response=one.response, profile=_PROFILE) for one in questions]
        started = time.perf_counter()
        decisions = [profile.decide(item) for item in items]
        elapsed_s = time.perf_counter() - started
        decided = [decision for decision in decisions if not isinstance(decision, Undecided)]
        if seed > 0:  # the first round warms up
            rates.append(len(decided) / elapsed_s)
            num_right += sum(isinstance(decision, Finding) and decision.credit == 1 for decision in decided)
            num_undecided += len(decisions) - len(decided)
    return statistics.median(rates), num_right, num_undecided


def _is_undecided(question: Question) -> bool:
    profile = make_profiles(RewardConfig(), {})[_PROFILE]
    return isinstance(
        profile.decide(Item(golds=question.golds, response=question.response, profile=_PROFILE)), Undecided
    )


async def _ask_one_worker(questions: list[Question]) -> tuple[float, float]:
    items = [question.to_proto(item_id=str(index)) for index, question in enumerate(questions)]
    with ServiceProcess(workers=1) as service:
        async with RewardClient(service.address) as client:
            await client.verify_batch(items[:50], timeout_s=60)
            started = time.perf_counter()
            num_right = 0
            for start in range(0, len(items), 500):
                verdicts = await client.verify_batch(items[start : start + 500], timeout_s=600)
                num_right += sum(verdict.score == 1 for verdict in verdicts)
            return len(items) / (time.perf_counter() - started), num_right / len(items)


def _peers(questions: list[Question]) -> list[tuple[object, ...]]:
    rows = []
    for name in PEERS:
        with Peer(name) as peer:
            peer.measure(questions[:20])
            verdicts, elapsed_s = peer.measure(questions)
        rows.append((name, len(questions), f"{len(questions) / elapsed_s:.0f}", f"{sum(verdicts) / len(verdicts):.3f}"))
    return rows
