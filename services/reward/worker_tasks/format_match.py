"""Checks whether a response has the format that a regular expression demands. Runs in worker processes only: `re`
backtracks, and a response can make it do so forever."""

import re

from penstock.verdict_status import Status
from services.reward.isolation.tasks import FormatTask, WorkerReply


def match(task: FormatTask) -> WorkerReply:
    """Return credit 1 if the whole text matches, else 0."""
    has_format = re.fullmatch(task.pattern, task.text, re.DOTALL) is not None
    return WorkerReply(status=Status.OK, credit=float(has_format))
