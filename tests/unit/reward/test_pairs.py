"""The profiles `math` and `geo3k` against labelled verdicts: nearly all right, and no attack earns anything."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.reward.config import RewardConfig
from services.reward.item import Item
from services.reward.profiles.profile import Undecided
from services.reward.profiles.registry import make_profiles
from services.reward.worker_tasks.perform import perform

DATA = Path(__file__).parents[2] / "data" / "reward"
MIN_ACCURACY = 0.98


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def judge_all(lines: list[dict[str, Any]]) -> list[float]:
    """The credit of every line; what the profile leaves undecided is compared here, without a worker."""
    profiles = make_profiles(RewardConfig(), {})
    credits = []
    for line in lines:
        golds = line["golds"] if "golds" in line else [line["gold"]]
        item = Item(golds=golds, response=line["response"], profile=line["profile"])
        decision = profiles[item.profile].decide(item)
        if isinstance(decision, Undecided):
            decision = perform(decision.task)
        credits.append(decision.credit)
    return credits


def describe(line: dict[str, Any]) -> str:
    gold = " | ".join(line.get("golds", [line.get("gold")]))
    return f"{line['id']} {line['category']}: {gold!r} and {line['response'][-100:]!r} ({line['note']})"


@pytest.mark.parametrize("name", ["pairs.jsonl", "attacks.jsonl"])
def test_every_line_is_complete(name: str) -> None:
    """Ids are unique, profiles known, fields filled in."""
    lines = read_lines(name)
    profiles = make_profiles(RewardConfig(), {})
    assert len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        assert ("gold" in line) != ("golds" in line), line["id"]
        assert line["profile"] in profiles
        assert line["response"]
        assert line["category"]
        assert isinstance(line["correct"], bool)
        assert isinstance(line["policy"], bool)


def test_pairs_are_judged_as_labelled() -> None:
    """At least 98% of the verdicts are the labels."""
    lines = read_lines("pairs.jsonl")
    misses = [
        f"wrongly {'right' if credit else 'wrong'}: {describe(line)}"
        for line, credit in zip(lines, judge_all(lines), strict=True)
        if credit != line["correct"]
    ]
    accuracy = 1 - len(misses) / len(lines)
    assert accuracy >= MIN_ACCURACY, f"{accuracy:.1%}\n" + "\n".join(misses)


def test_no_attack_earns_credit() -> None:
    """Answers that are made to look right are wrong."""
    lines = read_lines("attacks.jsonl")
    taken = [describe(line) for line, credit in zip(lines, judge_all(lines), strict=True) if credit]
    assert not any(line["correct"] for line in lines)
    assert not taken, "\n".join(taken)
