"""Other verifiers, as their users run them: in one process, on plain text, from their own libraries.

- math-verify: as in verl's `math_verify` reward: the gold answer boxed, the response read as expression or LaTeX.
- mathruler: as in the accuracy part of verl's `geo3k` reward: the last box, MATH's text rules, then sympy.
- slime: as in its `math` reward: the last box, without which all is wrong, and the same text rules and sympy comparison
  (that of PRM800K), here from mathruler too.

Each lives in its own process, which is killed when an item exceeds a limit that none of them has itself.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from bench.reward.items import Question

_MEMORY_BYTES = 4 * 2**30

Grade = Callable[[str, str], bool]
"""Returns whether a response, the second argument, has the value of a gold answer."""


class Peer:
    """One verifier, in a process that can be killed; use it as a context manager."""

    def __init__(self, name: str, *, limit_s: float = 10.0) -> None:
        """Use the verifier `name`, a key of PEERS; an item may take `limit_s`."""
        self.name = name
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def grade(self, question: Question) -> bool | None:
        """Return whether the answer is right; None if there was no verdict in time."""
        found = self._ask([question], self._limit_s)
        return None if found is None else found[0][0]

    def measure(self, questions: Sequence[Question]) -> tuple[list[bool], float]:
        """Return the verdicts and their seconds, measured in the verifier's process, so that messages do not count."""
        found = self._ask(questions, max(60.0, self._limit_s * len(questions)))
        if found is None:
            raise RuntimeError(f"{self.name} did not end on ordinary items")
        return found

    def _ask(self, questions: Sequence[Question], limit_s: float) -> tuple[list[bool], float] | None:
        try:
            self._connection.send(questions)
            if self._connection.poll(limit_s):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        self._end()
        self._start()
        return None

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_live, args=(self.name, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _live(name: str, connection: multiprocessing.connection.Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    warnings.simplefilter("ignore")
    logging.disable()
    grade = PEERS[name]()
    grade("5", r"\boxed{5}")
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            questions = connection.recv()
            started = time.perf_counter()
            verdicts = [any(grade(gold, one.response) for gold in one.golds) for one in questions]
            connection.send((verdicts, time.perf_counter() - started))


def _math_verify() -> Grade:
    from math_verify.errors import TimeoutException
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    metric = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )

    def grade(gold: str, response: str) -> bool:
        try:
            return metric([f"\\boxed{{{gold}}}"], [response])[0] == 1
        except (Exception, TimeoutException):  # noqa: BLE001 - as verl does
            return False

    return grade


def _mathruler() -> Grade:
    from mathruler.grader import extract_boxed_content, grade_answer

    def grade(gold: str, response: str) -> bool:
        return bool(grade_answer(extract_boxed_content(response), gold))

    return grade


def _slime() -> Grade:
    from mathruler.grader import grade_answer

    def grade(gold: str, response: str) -> bool:
        answer = _last_box(response)
        return answer is not None and bool(grade_answer(answer, gold))

    return grade


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if text[index] == "}" and depth == 0:
            box = text[start : index + 1]
            return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") else None
    return None


PEERS: dict[str, Callable[[], Grade]] = {
    "math-verify (verl's wrapper)": _math_verify,
    "mathruler (verl geo3k)": _mathruler,
    "slime math (sympy)": _slime,
}
