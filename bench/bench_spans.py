"""What spans cost: processor time and bytes, from the call that records one to its line in the run folder.

    python bench/bench_spans.py                # the spans of a step of the demo, the fastest of 200 times

Each part is done in this process, for each process of the demo by itself, and timed alone. What NATS takes to carry a
message is not in it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.bus.span_stream import StoredBatch, is_line
from penstock.telemetry import spans
from services.trainer.telemetry.span_files import SpanFiles

_GROUP: Final = "tiny-cpu-20261130-114622/1234/0/5f0c6f7a"
_REQUEST: Final = f"{_GROUP}/3/0/0123456789ab"
_ABOUT_SAMPLE: Final[Mapping[str, Any]] = {"group": _GROUP, "sample": 3}
_ABOUT_CALL: Final[Mapping[str, Any]] = {"group": _GROUP, "request": _REQUEST}
_TOKENS: Final[Mapping[str, Any]] = {"num_tokens": 5, "num_prompt_tokens": 35, "num_cached_tokens": 26}
_PUSH: Final[Mapping[str, Any]] = {"stage": "receive", "version": 1234, "push": "0123456789abcdef"}

_STEP: Final[Mapping[str, Sequence[tuple[str, int, Mapping[str, Any]]]]] = {
    "worker-0": (
        ("group.queued", 32, {"group": _GROUP}),
        (
            "turn",
            128,
            {
                **_ABOUT_SAMPLE,
                "turn": 0,
                "replica": "rollout-0-0123abcd",
                "wait_s": 0.12345678,
                "decode_s": 0.012345678,
                **_TOKENS,
            },
        ),
        ("episode", 128, {**_ABOUT_SAMPLE, "finish_reason": "stop"}),
        ("verify", 32, {"group": _GROUP, "num_answers": 4}),
        (
            "group.played",
            32,
            {
                "group": _GROUP,
                "delivery": 1,
                "num_samples": 4,
                "mean_reward": 0.75,
                "num_own_tokens": 20,
                "oldest_version": 1234,
                "num_unjudged": 0,
                "endings": {"stop": 4},
                "statuses": {"OK": 4},
            },
        ),
        ("group.published", 32, {"group": _GROUP, "size_bytes": 2345, "is_new": True}),
    ),
    "router": (
        ("route.queued", 35, {**_ABOUT_CALL, "attempt": 1, "replica": "rollout-0-0123abcd"}),
        (
            "route.attempt",
            128,
            {
                **_ABOUT_CALL,
                "attempt": 1,
                "replica": "rollout-0-0123abcd",
                "outcome": "complete",
                "first_token_s": 0.12345678,
            },
        ),
    ),
    **{
        f"rollout-{number}": (
            ("call", 64, {**_ABOUT_CALL, "first_token_s": 0.12345678, "version": 1234, **_TOKENS}),
            ("push.received", 5, _PUSH),
            ("paused", 1, {"version": 1234, "then": "serving"}),
        )
        for number in range(2)
    },
    "trainer": (
        ("group.admitted", 32, {"group": _GROUP, "version": 1234}),
        ("group.held", 32, {"group": _GROUP, "step": 1234}),
        ("push.stage", 8, {**_PUSH, "replica": "rollout-0-0123abcd"}),
    ),
    "reward": (("judged", 32, {"item": f"{_GROUP}/0", "num_items": 4}),),
}
"""The spans of a step of the demo by process: name, how many, and attributes."""


class Times:
    """Processor time of each part, as the fastest repetition took."""

    def __init__(self) -> None:
        """Start without a measurement."""
        self.fastest_s: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Measure the context."""
        began = time.process_time()
        yield
        took_s = time.process_time() - began
        self.fastest_s[part] = min(took_s, self.fastest_s.get(part, took_s))


def measure(
    process: str, recorded: Sequence[tuple[str, int, Mapping[str, Any]]], files: SpanFiles, times: Times
) -> tuple[int, int]:
    """Take the spans of a process from the call to the file; return how many, and their bytes."""
    buffer = spans.open_buffer(process)
    record: Callable[..., None] = spans.record
    with times.of("record"):
        for name, num_spans, attributes in recorded:
            for _ in range(num_spans):
                record(name, 0.0, **attributes)
    with times.of("encode"):
        payload, num_spans = buffer.take_batch(len(buffer))
    with times.of("check"):
        assert is_line(payload)
    with times.of("write"):
        files.append([StoredBatch(sequence=1, stored_at=time.time(), payload=payload)])
    spans.close_buffer()
    return num_spans, len(payload)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    write = sys.stdout.write
    write("| process | spans | bytes | record, us | encode, us | check, us | write, us |\n")
    write("|---|---|---|---|---|---|---|\n")
    totals = [0.0] * 6
    for process, recorded in _STEP.items():
        times = Times()
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(repeats):
                size = measure(process, recorded, SpanFiles(Path(scratch), max_bytes=2**30), times)
        row = [*size, *(1e6 * seconds for seconds in times.fastest_s.values())]
        totals = [before + value for before, value in zip(totals, row, strict=True)]
        write(f"| {process} | {' | '.join(f'{value:.0f}' for value in row)} |\n")
    write(f"| all | {' | '.join(f'{value:.0f}' for value in totals)} |\n")
    write(f"\n{sum(totals[2:]) / 1e3:.2f} ms a step, {sum(totals[2:]) / totals[0]:.2f} us a span\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
