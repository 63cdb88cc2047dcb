"""Passes on SGLang's own metrics, which its processes write to files in a folder.

prometheus_client decides at its import whether metrics are kept in memory or in files, but it looks at that decision
for each metric, and each combination of labels, that it creates. In an engine's process, after `keep_in_files`, the
name decides: SGLang's are kept in files, ours in memory. Children that are forked inherit that; children that are
spawned keep all of their metrics in files. `sglang_plugin/metric_files.py` reserves room for the files.
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "sglang:"


class SglangMetrics:
    """The metrics of SGLang's processes."""

    def __init__(self, folder: Path) -> None:
        """Read the files in `folder`."""
        self._collector = MultiProcessCollector(None, path=str(folder))  # type: ignore[no-untyped-call]

    @classmethod
    def keep_in_files(cls, folder: Path) -> "SglangMetrics":
        """Have SGLang's metrics that are created from now on, here and in children, kept in files in `folder`."""
        folder.mkdir(exist_ok=True)
        os.environ[_VARIABLE] = str(folder)
        value_in_file = values.get_value_class()  # type: ignore[no-untyped-call]

        def value(kind: str, name: str, *args: Any, **kwargs: Any) -> object:
            make = value_in_file if name.startswith(_PREFIX) else values.MutexValue
            return make(kind, name, *args, **kwargs)

        values.ValueClass = value
        return cls(folder)

    async def read(self) -> Iterable[Metric]:
        """Return SGLang's metrics, under SGLang's names."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Metric]:
        collected: Iterable[Metric] = self._collector.collect()  # type: ignore[no-untyped-call]
        return [metric for metric in collected if metric.name.startswith(_PREFIX)]
