"""Accuracy: verdicts on labelled pairs, and wrong answers designed to pass."""

import json
from pathlib import Path
from typing import Any

from bench.reward.items import Question
from bench.reward.peers import PEERS, Peer
from bench.reward.report import Report
from penstock.clients import RewardClient
from penstock.v1 import reward_pb2

_PROFILES = ("math", "geo3k")
ACCURACY_BAR = 0.98


async def measure(report: Report, client: RewardClient, files: list[Path]) -> None:
    """Verify every file with both profiles and with each peer.

    A file has lines {"id", "gold" or "golds", "response", "correct"}; "profile", if present, is the label's profile.
    """
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        questions = [Question(golds=_golds(row), response=row["response"]) for row in rows]
        labels = [row["correct"] for row in rows]
        table = []
        own = [row.get("profile", "math") for row in rows]
        for name, profiles in (("penstock", own), *((f"penstock {one}", [one] * len(rows)) for one in _PROFILES)):
            items = [
                question.to_proto(item_id=str(index), profile=profile)
                for index, (question, profile) in enumerate(zip(questions, profiles, strict=True))
            ]
            verdicts: list[reward_pb2.Verdict] = []
            for start in range(0, len(items), 500):
                verdicts += await client.verify_batch(items[start : start + 500], timeout_s=600)
            found = [verdict.score == 1 for verdict in verdicts]
            table.append(_row(name, labels, found, 0))
            if name == "penstock":
                wrong = [row["id"] for row, label, one in zip(rows, labels, found, strict=True) if label != one]
                _verify(report, file, labels, found, wrong)
        for name in PEERS:
            with Peer(name) as peer:
                graded = [peer.grade(question) for question in questions]
            table.append(_row(name, labels, [verdict is True for verdict in graded], graded.count(None)))
        report.table(
            f"Accuracy on {_short(file)}: {len(rows)} pairs, {sum(labels)} right",
            ("verifier", "accuracy", "wrong called right", "right called wrong", "no answer in 10 s"),
            table,
            note='"penstock" takes each pair\'s own profile, math where it names none.',
        )


def _short(file: Path) -> str:
    return "/".join(file.parts[-3:])


def _golds(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row["golds"]) if "golds" in row else (row["gold"],)


def _row(name: str, labels: list[bool], found: list[bool], num_unanswered: int) -> tuple[object, ...]:
    agreed = sum(label == one for label, one in zip(labels, found, strict=True))
    false_positives = sum(one and not label for label, one in zip(labels, found, strict=True))
    accuracy = f"{agreed}/{len(labels)} = {100 * agreed / len(labels):.1f}%"
    return name, accuracy, false_positives, len(labels) - agreed - false_positives, num_unanswered


def _verify(report: Report, file: Path, labels: list[bool], found: list[bool], wrong: list[str]) -> None:
    accuracy = 1 - len(wrong) / len(labels)
    told = f"{100 * accuracy:.1f}%" + (f"; differs on {', '.join(wrong[:20])}" if wrong else "")
    if any(labels):
        report.bar(f"accuracy on {_short(file)} >= 98%", holds=accuracy >= ACCURACY_BAR, measured=told)
    else:
        report.bar(f"no false positive on {_short(file)}", holds=not wrong, measured=told)
