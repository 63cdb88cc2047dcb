"""math-verify with its defaults: its own extraction and comparison. Runs in worker processes only.

Its parser of plain expressions evaluates Python, but its own regular expression admits only digits, operators, brackets
and blanks. Its time limits are off, because the server keeps the deadline and kills.
"""

import logging

from math_verify import parse, verify

from penstock.verdict_status import Status
from services.reward.isolation.tasks import MathVerifyTask, WorkerReply
from services.reward.verdict import Method

# It warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify_response(task: MathVerifyTask) -> WorkerReply:
    """Return whether math-verify's answer from the response equals its answer from one of the golds."""
    golds = [found for gold in task.golds if (found := parse(gold, parsing_timeout=None))]
    if not golds:
        return WorkerReply(status=Status.GOLD_INVALID)
    given = parse(task.response, parsing_timeout=None)
    if not given:
        return WorkerReply(status=Status.NO_ANSWER)
    right = any(verify(gold, given, timeout_seconds=None) for gold in golds)
    extracted = given[-1] if isinstance(given[-1], str) else ""  # the parsed text comes last
    return WorkerReply(status=Status.OK, credit=float(right), extracted=extracted, method=Method.SYMBOLIC)
