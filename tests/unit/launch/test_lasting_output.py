"""Output that goes away while a run goes on."""

import os
import sys

import pytest
import structlog
from rich.console import Console
from rich.live import Live

from services.launch.terminal.lasting_output import lasting_output


def test_a_full_disk_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something could be written again."""
    with open("/dev/full", "w") as full, structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(sys, "stdout", full)
        with lasting_output():
            for _ in range(20):
                sys.stdout.write("a line\n")
                sys.stdout.flush()
        with open(os.devnull, "w") as nowhere:  # where its buffer goes when it is closed
            os.dup2(nowhere.fileno(), full.fileno())
    assert [entry["event"] for entry in logs] == ["output.lost"]


def test_a_table_that_changes_in_place_survives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes standard output over, and still writes to what lasts."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(sys, "stdout", pipe)
        with lasting_output(), Live(console=Console(force_terminal=True), auto_refresh=False) as live:
            os.close(reader)
            for _ in range(3):
                live.console.print("a line")
                live.update("a table", refresh=True)
    assert [entry["event"] for entry in logs] == ["output.lost"]
