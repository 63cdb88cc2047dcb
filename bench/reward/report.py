"""The report of a benchmark run: tables and bars on standard output, and everything as one JSON object."""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("penstock", "math-verify", "sympy", "mathruler", "pylatexenc", "grpcio", "uvicorn", "fastapi")


class Report:
    """A report that prints as it grows."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Any]] = []
        self.all_hold = True
        """Whether no bar has failed so far."""

    def machine(self) -> None:
        """Print the machine that the numbers were measured on."""
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        lines = [
            f"machine: {os.cpu_count()} cores of {_processor()}, {memory_gib:.0f} GiB; {platform.platform()}",
            f"python {platform.python_version()}; {versions}",
            f"load before the run: {load}",
        ]
        self._parts.append({"machine": lines})
        self._say("\n".join(lines))

    def table(self, title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]], *, note: str = "") -> None:
        """Print one table."""
        self._parts.append({"title": title, "columns": columns, "rows": rows, "note": note})
        lines = [f"\n## {title}\n", *([f"{note}\n"] if note else []), f"| {' | '.join(columns)} |"]
        lines.append(f"|{'---|' * len(columns)}")
        lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
        self._say("\n".join(lines))

    def note(self, text: str) -> None:
        """Print what else a reader of the numbers should know."""
        self._parts.append({"note": text})
        self._say(f"\n{text}")

    def bar(self, name: str, *, holds: bool, measured: str) -> None:
        """Print whether the service meets a bar."""
        self.all_hold &= holds
        self._parts.append({"bar": name, "holds": holds, "measured": measured})
        self._say(f"\nbar: {name}: {'holds' if holds else 'FAILS'} ({measured})")

    def write(self, path: Path) -> None:
        """Write everything that was printed."""
        path.write_text(json.dumps(self._parts, indent=1, default=str) + "\n")

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def percentile(values: list[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
