"""The launcher's own spans: when each process of the run started, was ready, and ended."""

import time
from pathlib import Path
from typing import Any

import structlog

from penstock.telemetry.json_lines import append_lines
from penstock.telemetry.spans import SpanBuffer

log = structlog.get_logger()


class ProcessTrace:
    """Appends to a file in `trace` of the run folder, of the same form as the spans of other processes."""

    def __init__(self, folder: Path) -> None:
        """Begin a file in the run folder `folder`; what earlier launchers have not seen end is lost from then on."""
        earlier = [path.stem.removeprefix("launcher-") for path in (folder / "trace").glob("launcher-*.jsonl")]
        after = 1 + max((int(number) for number in earlier if number.isdecimal()), default=0)  # of another host's clock
        self._path = folder / "trace" / f"launcher-{max(time.time_ns() // 1_000_000, after):013d}.jsonl"
        self._buffer = SpanBuffer("launcher")
        self._append(b"")

    def add(self, name: str, began: float, ended: float, /, **attributes: Any) -> None:
        """Write a span, by times of `time.monotonic()`. A full disk loses it."""
        self._buffer.add(name, began, ended, attributes)
        payload, _ = self._buffer.take_batch(1)
        self._append(b'{"sequence":0,"stored":null,"batch":%b}\n' % payload)

    def _append(self, line: bytes) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, line)
        except OSError as error:
            log.debug("spans.not_kept", reason=str(error))
