"""What SGLang's scheduler does in each round of its loop while it is paused."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained.grammar_manager import GrammarManager

from services.rollout.engine.sglang_plugin import hooks


class Backend:
    """What SGLang's grammar manager asks of a back end."""

    def set_cache(self, _key: object, _value: object) -> None:
        """Keep nothing."""


def constrained(rid: str) -> Any:
    """A request whose grammar is being compiled."""
    return SimpleNamespace(
        rid=rid, grammar=Future(), grammar_key=("regex", "yes"), grammar_wait_ct=0, finished=lambda: False
    )


class Scheduler:
    """SGLang's own grammar queue in a scheduler of one rank, which notes what it is told to do."""

    def __init__(self, requests: list[Any]) -> None:
        self.waiting_queue: list[Any] = []
        self.num_sleeps = 0
        self.grammar_manager = GrammarManager.__new__(GrammarManager)
        self.grammar_manager.__dict__.update(
            grammar_queue=requests, grammar_backend=Backend(), grammar_sync_size=1, pp_rank=0, pp_size=1,
            SGLANG_GRAMMAR_POLL_INTERVAL=0.25, SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=100,
        )  # fmt: skip

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def maybe_sleep_on_idle(self) -> None:
        self.num_sleeps += 1


@pytest.fixture
def grammar() -> str:
    """A compiled grammar; it can be copied like SGLang's."""
    return type("Grammar", (str,), {"copy": lambda self: self})("compiled")


def test_requests_are_queued_once_their_grammar_is_compiled(grammar: str) -> None:
    """Even while paused: SGLang flushes no cache while one of them awaits its grammar, and a push would wait for ever.
    It does not sleep before all are queued, because no message would wake it."""
    first, second = requests = [constrained("first"), constrained("second")]
    scheduler = Scheduler(requests)
    first.grammar.set_result(grammar)
    compiling = second.grammar
    hooks._wait_while_paused(None, scheduler)
    assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([first], [second])
    assert first.grammar == "compiled"
    compiling.set_result(grammar)
    hooks._wait_while_paused(None, scheduler)
    assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([first, second], [])
    assert scheduler.num_sleeps == 0


def test_a_paused_engine_sleeps_if_no_grammar_is_awaited() -> None:
    """It leaves the cores to whoever sends or loads weights."""
    scheduler = Scheduler([])
    hooks._wait_while_paused(None, scheduler)
    assert (scheduler.num_sleeps, scheduler.waiting_queue) == (1, [])
