"""Whether a response has the format that a regular expression demands. Runs in worker processes only: `re` backtracks,
and a response can make it do so for ever."""

import re

from penstock.verdict_status import Status
from services.reward.isolation.tasks import FormatTask, WorkerReply


def match(task: FormatTask) -> WorkerReply:
    """Credit 1 if all of the text matches, else 0."""
    has_format = re.fullmatch(task.pattern, task.text, re.DOTALL) is not None
    return WorkerReply(status=Status.OK, credit=float(has_format))
