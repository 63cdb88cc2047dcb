"""Entry point of worker processes: a task in, a reply out."""

from collections.abc import Mapping

from penstock.verdict_status import Status
from services.reward.isolation.tasks import (
    FormatTask,
    MathVerifyTask,
    Prm800kTask,
    SymbolicTask,
    Task,
    VerifierTask,
    WorkerReply,
)
from services.reward.worker_tasks import custom_verifier, format_match, math_verify_call, prm800k_grader
from services.reward.worker_tasks.symbolic import compare

_verifiers: dict[str, custom_verifier.CustomVerifier] = {}


def prepare(verifiers: Mapping[str, str]) -> None:
    """Load once what workers inherit, before any is forked; it may raise anything, with a message for the user."""
    for name, spec in verifiers.items():
        _verifiers[name] = custom_verifier.load_verifier(name, spec)
    # On first use, both graders fill caches and import the rest of sympy; workers may not read files.
    for gold, answer in ((r"\frac{8\sqrt{3}}{3}", r"\frac{8}{\sqrt{3}}"), ("2x+ln(2)", "x*2+1"), ("(1,2)", "(1,3)")):
        prm800k_grader.grade(Prm800kTask(golds=(gold,), answer=answer))
    math_verify_call.verify_response(
        MathVerifyTask(golds=("$[0,1)$", "1/2"), response="Final answer: 1/2 + 1 = $3/2$ or 50%")
    )


def perform(task: Task) -> WorkerReply:
    """Do `task`. It may raise anything, take any time and any memory."""
    match task:
        case SymbolicTask():
            return compare(task)
        case Prm800kTask():
            return prm800k_grader.grade(task)
        case MathVerifyTask():
            return math_verify_call.verify_response(task)
        case FormatTask():
            return format_match.match(task)
        case VerifierTask():
            verifier = _verifiers.get(task.verifier)
            if verifier is None:
                return WorkerReply(status=Status.FAILED, detail="it was not loaded")
            return custom_verifier.run_verifier(verifier, task)
