"""Counts in an account what the recording functions of this process use.

Not counted: arguments that a caller computes for a span, what an event loop does between two steps of a task, and what
the bus connection of the trainer, which it has anyway, does to receive spans.
"""

import contextvars
from collections.abc import Coroutine
from typing import Any, Final

from nats.aio.client import Client

from bench.recording.account import Account, Part
from penstock.bus import span_stream
from penstock.telemetry import spans

_is_for_spans: Final = contextvars.ContextVar("is_for_spans", default=False)
"""Whether a task belongs to a connection for spans."""


def count_spans(account: Account) -> None:
    """Count what it takes to make spans and to send them, with the tasks of their connection."""
    spans.record = account.timed(Part.RECORD, spans.record)
    keep_sending = account.timed_steps(Part.SEND, span_stream._keep_sending)

    async def keep_sending_marked(*args: Any) -> None:
        _is_for_spans.set(True)  # for this task, and for those that its connection starts
        await keep_sending(*args)

    span_stream._keep_sending = keep_sending_marked
    for name in ("_flusher", "_read_loop"):
        setattr(Client, name, _counted_for_spans(account, getattr(Client, name)))


def _counted_for_spans(account: Account, method: Any) -> Any:
    counted = account.timed_steps(Part.SEND, method)

    def call(client: Client) -> Coroutine[Any, Any, None]:
        return counted(client) if _is_for_spans.get() else method(client)

    return call


def count_trainer(account: Account) -> None:
    """Count what the trainer does with spans of all processes, and with groups."""
    from services.trainer.loop import TrainingLoop
    from services.trainer.telemetry import span_files
    from services.trainer.telemetry.episodes.files import EpisodeFiles
    from services.trainer.telemetry.episodes.log import EpisodeLog

    span_files._collect = account.timed_steps(Part.COLLECT, span_files._collect)
    for owner, name, part in (
        (span_files.SpanFiles, "append", Part.WRITE),
        (TrainingLoop, "_keep_episodes", Part.HAND_OVER),
        (EpisodeLog, "keep_left_out", Part.HAND_OVER),
        (EpisodeLog, "_chosen", Part.KEEP),
        (EpisodeLog, "_describe", Part.KEEP),
        (EpisodeFiles, "add", Part.KEEP),
    ):
        setattr(owner, name, account.timed(part, getattr(owner, name)))
